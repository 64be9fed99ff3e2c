"""What all training runs share: how they start, stop, retry and sum up."""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from actors.cluster import ActorCluster
from rlhf.checkpoint import CheckpointStore
from rlhf.config import Config
from rlhf.driver import Driver
from rlhf.errors import ConfigError, DeadlineError, GpuMemoryError, RoleLostError, one_line
from rlhf.evaluation import BestModel
from rlhf.recipes import to_yaml
from rlhf.resume import check_resume, read_run
from rlhf.reward_config import RewardTrainingConfig
from rlhf.reward_driver import RewardTraining
from rlhf.roles import Trained
from rlhf.tracking import Tracker, print_summary, write_summary

Actors = TypeVar("Actors", bound=ActorCluster)
AnyConfig = TypeVar("AnyConfig", Config, RewardTrainingConfig)
Loop = Driver | RewardTraining


def find_start(config: AnyConfig, checkpoints: CheckpointStore) -> tuple[AnyConfig, dict[str, Any] | None]:
    """The configuration with its date, and the state of the checkpoint that the run will resume, if any.

    A run keeps the date on which it began, because its prompts must stay the same. Raises CheckpointError.
    """
    directory = checkpoints.find(config.checkpoint.resume)
    state = None if directory is None else read_run(directory)
    first_date = date.today().isoformat() if state is None else state["config"]["data"]["date"]
    return replace(config, data=replace(config.data, date=config.data.date or first_date)), state


def begin(
    config: Config | RewardTrainingConfig,
    checkpoints: CheckpointStore,
    state: dict[str, Any] | None,
    run: dict[str, Any],
) -> Path:
    """The run directory, with config.yaml in it; nothing is written until what the run resumes is known to fit.

    ``state``: of the checkpoint to resume; ``run``: from ``describe_run``. Raises CheckpointError if the two do not
    fit, ConfigError if there is nothing left to do.
    """
    run_dir = Path(config.run_dir).resolve()
    if state is not None:
        assert checkpoints.current is not None
        line = check_resume(checkpoints.current, state, run)
        if _is_done(run_dir, state["step"], run["num_steps"]):
            longer = "num_steps" if isinstance(config, Config) else "num_epochs"
            holder = config.run_dir if checkpoints.current.parent == checkpoints.directory else checkpoints.current
            raise ConfigError(
                f"{holder} already holds step {state['step']} of {run['num_steps']}; raise {longer}, change name, or "
                "set checkpoint.resume=none"
            )
        print(line, flush=True)
    checkpoints.run = run
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    return run_dir


def _is_done(run_dir: Path, step: int, num_steps: int) -> bool:
    """Whether the run has nothing left to do. One that ended right after its last checkpoint still has its model to
    write, and then its summary."""
    if step != num_steps:
        return step > num_steps
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        return False
    return summary.get("status") == "completed" and summary.get("steps") == step


@contextlib.contextmanager
def started(cluster: Actors, tracker: Tracker) -> Iterator[Actors]:
    """Starts all the cluster's actors, as a timed phase of the run."""
    with contextlib.ExitStack() as stack:
        with tracker.phase("start"):
            stack.enter_context(cluster)
        yield cluster


@contextlib.contextmanager
def handling(handlers: Mapping[int, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Signal handlers, if this is the main thread; afterwards those of before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """SIGTERM ends what has nothing to save (starting, exporting) as an error would; further ones are ignored."""
    told = False

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal told
        told = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send several; the actors must be ended in order
        os.write(2, b"\nstopped by SIGTERM outside of a step; the same command resumes from the last checkpoint\n")
        raise SystemExit(128 + signum)

    with handling({signal.SIGTERM: end}):
        try:
            yield
        except SystemExit as error:
            if told:
                raise exit_of(error, signal.SIGTERM) from None
            raise


def exit_of(error: SystemExit, signum: int) -> SystemExit:
    """What a signal's handler raised, with its code: where it interrupts a call of Ray's, Ray raises another, of 1."""
    return SystemExit(128 + signum) if error.code == 1 else error


@contextlib.contextmanager
def stops_at_step_end(loop: Loop) -> Iterator[None]:
    """Ctrl-C: finish the step, save, stop; the second one stops now. SIGTERM: the same within ``checkpoint.grace_s``,
    however many follow.

    After a request to stop there is no restart: losing an actor before the step ends stops the run. Raises
    SystemExit, and says what is lost, if the run ends without having saved.
    """
    grace_s = loop.config.checkpoint.grace_s

    def request(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGALRM:
            raise SystemExit(128 + signal.SIGTERM)
        if signum == signal.SIGINT and loop.stop_requested:
            raise SystemExit(128 + signum)
        if signum == loop.stop_requested:
            return
        loop.stop_requested = signum
        how = f"{'Ctrl-C again' if os.isatty(0) else 'another SIGINT'} stops at once"
        if signum == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, grace_s)
            how = f"within checkpoint.grace_s={grace_s:g} s"
        message = f"stopping at the end of this step, with a checkpoint; {how}"
        if not loop.tracker.stopping(message):  # it prints nothing: a signal may land in the middle of its own write
            os.write(2, f"\n{message}\n".encode())

    try:
        with handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGALRM), request)):
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except (RoleLostError, DeadlineError, GpuMemoryError, SystemExit) as error:
        if not loop.stop_requested:
            raise
        why = "" if isinstance(error, SystemExit) else f" ({error})"
        print(
            f"stopped in step {loop.step + 1}, unsaved{why}: {loop.checkpoints.describe_loss(loop.step)}",
            file=sys.stderr,
            flush=True,
        )
        if isinstance(error, SystemExit):
            raise exit_of(error, loop.stop_requested) from None
        raise SystemExit(128 + loop.stop_requested) from error
    finally:
        if loop.stop_requested == signal.SIGTERM:  # and ``ends_on_sigterm`` must not end the rest
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def save_final(loop: Loop, num_steps: int, learner: Trained, tokenizer: PreTrainedTokenizerBase) -> Path | None:
    """Saves the trained model as a Hugging Face directory if the loop made all ``num_steps``; None: nothing saved."""
    if loop.step < num_steps or not loop.config.checkpoint.save_final_model:
        return None
    final = loop.tracker.run_dir / "model"
    save_model(learner, tokenizer, final)
    return final


def save_model(learner: Trained, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Saves a model as a Hugging Face directory."""
    learner.save_model(str(directory))
    tokenizer.save_pretrained(directory)


def keeps_best(loop: Loop, tokenizer: PreTrainedTokenizerBase) -> BestModel | None:
    """What keeps the loop's best model in best/; None if ``checkpoint.keep_best`` asks for none."""
    if (metric := loop.config.checkpoint.keep_best) is None:
        return None
    return BestModel(
        metric, loop.tracker.run_dir / "best", save=lambda path: save_model(loop.trained()["learner"], tokenizer, path)
    )


def summarise(
    loop: Loop, num_steps: int, final_model: Path | None, device: str, memory: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Writes summary.json, prints it as a table, and says how to continue a run that was stopped.

    Returns what it wrote, and with it the ``signal`` that stopped the run (0: none).

    ``num_steps``: of the whole run; ``memory``: GiB by role, on the host and on the GPU.
    """
    tracker, finished = loop.tracker, loop.step >= num_steps
    summary = write_summary(
        tracker.run_dir,
        eval_before=loop.evaluations.get(0),
        eval_after=loop.evaluations.get(num_steps),
        steps=loop.step,
        tracker=tracker,
        device=device,
        peak_memory_gib=memory,
        final_model=final_model,
        best=loop.best.best if loop.best else {},
        status="completed" if finished else "interrupted",
    )
    tracker.close()  # the live lines would run into the table
    print_summary(summary)
    if not finished:
        tracker.note(f"stopped after step {loop.step} of {num_steps}; the same command resumes from there")
    return summary | {"signal": loop.stop_requested}


def leave_report(run_dir: Path) -> None:
    """Writes the report of a run that has ended, and says where it is. Whatever goes wrong with it is a warning."""
    try:
        from jobs.report.command import write_report  # plotly's code for browsers alone is 5 MB

        print(f"report: {write_report([run_dir])}", flush=True)
    except Exception as error:
        print(f"warning: no report: {one_line(error)}; try again: rlhf report {run_dir}", file=sys.stderr, flush=True)
