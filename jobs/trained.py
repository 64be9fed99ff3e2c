"""Finds the model that a command is given: a directory, a run's, or one on the hub."""

from pathlib import Path

from rlhf.errors import ConfigError

CONFIG = "config.yaml"  # in a run directory


def is_run(path: str) -> bool:
    """Whether it is the directory of a run."""
    return (Path(path).expanduser() / CONFIG).is_file()


def find_model(model_or_run: str) -> str:
    """The path of the model itself, or the hub's id. Raises ConfigError if a directory holds none."""
    directory = Path(model_or_run).expanduser()
    if not directory.is_dir() or (directory / "config.json").is_file():
        return model_or_run
    if not is_run(model_or_run):
        raise ConfigError(
            f"{model_or_run}: neither a model's directory (no config.json) nor a run's (no {CONFIG}); a run's models "
            "are its model/, and best/ with checkpoint.keep_best"
        )
    if not (directory / "model" / "config.json").is_file():
        best = f", or take {directory / 'best'}" if (directory / "best" / "config.json").is_file() else ""
        raise ConfigError(
            f"{model_or_run}: the run has left no model/: it has not ended, or checkpoint.save_final_model=false; "
            f"resume it with that set to true{best}"
        )
    return str(directory / "model")
