"""What the loops ask of every role, in which order; that a resumed run asks what a straight one does."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf.algorithms import make_algorithm
from rlhf.batch import Prompt
from rlhf.checkpoint import CheckpointStore, read_state
from rlhf.checks.gate import DIFFERENCE, SamplingGate
from rlhf.data.preferences import Pair
from rlhf.data.prompt_stream import PromptStream
from rlhf.data.prompts import PromptReport, PromptSet
from rlhf.driver import Driver
from rlhf.errors import DeadlineError, GpuMemoryError, RoleLostError, SamplingError
from rlhf.evaluation import BestModel
from rlhf.recipes import load_config
from rlhf.reward_config import RewardTrainingConfig
from rlhf.reward_driver import RewardTraining
from rlhf.roles import Roles
from rlhf.run import Run
from rlhf.stream import GroupStream
from rlhf.tracking import Tracker
from tests.clock import Clock
from tests.fake_roles import Event, Judge, Model, Pool, Reference, lose

CONF = Path(__file__).resolve().parents[2] / "conf"
NUM_PROMPTS = 5
OF_THIS_PROCESS = ("phases", "wall_s")  # of a tracker's state
SAMPLED_LATER = {"versions", "compared"}  # what differs where completions were sampled again


def tracker_of(config: Any, run_dir: Path, num_steps: int) -> Tracker:
    tokenizer: Any = SimpleNamespace(batch_decode=lambda ids, **_: [" ".join(map(str, row)) for row in ids])
    return Tracker(replace(config.tracking, tensorboard=False), run_dir, num_steps=num_steps, tokenizer=tokenizer)


def policy_run(run_dir: Path, *overrides: str, recipe: str = "ppo_tiny", **parts: Any) -> tuple[Driver, list[Event]]:
    """A run over fake roles, and what they are told. Prompts are of one token, and two make a step."""
    fixed = ["algorithm.prompts_per_step=2", "algorithm.num_minibatches=1", "rollout.logprobs=true"]
    fixed += ["tracking.progress=false", "tracking.completions_every_steps=2", "algorithm.beta=0.1"]
    config = load_config(CONF / f"{recipe}.yaml", [*fixed, *overrides])
    told: list[Event] = []
    learner = Model("policy", told, -1.0, {"loss": 1.0, DIFFERENCE: 0.2})
    critic = Model("critic", told, 0.25, {"critic/loss": 10.0}) if config.uses_critic else None
    ids = [np.array([10 + row], np.int32) for row in range(NUM_PROMPTS)]
    prompts = PromptSet(
        "test", [f"p{i}" for i in range(NUM_PROMPTS)], ids, None, {}, PromptReport(NUM_PROMPTS, 0, 0, 1)
    )
    pool, judge = Pool(learner, told, logprobs=config.needs_rollout_logprobs), Judge(told)
    reference = Reference(told) if config.uses_reference else None
    tracker = tracker_of(config, run_dir, config.num_steps)
    stream = PromptStream(prompts, shuffle=True, seed=config.seed)
    arguments: dict[str, Any] = {
        "config": config,
        "roles": Roles(learner, pool, judge, reference, critic),  # type: ignore[arg-type]
        "algorithm": make_algorithm(config.algorithm),
        "stream": GroupStream(stream, pool, judge, reference, config, tracker.phase),
        "held_out": {"": [Prompt(i, [30 + i], f"h{i}") for i in range(2)]},
        "gate": SamplingGate(math.inf, math.inf),
        "tracker": tracker,
        "roofline": SimpleNamespace(figures=lambda *_, **__: {}),
        "checkpoints": CheckpointStore(run_dir, keep=9),
    }
    return Driver(**(arguments | parts)), told


def reward_run(run_dir: Path, *overrides: str) -> tuple[RewardTraining, list[Event]]:
    """Five pairs, two a step: three steps an epoch. Texts are of one token."""
    fixed = ["batch_pairs=2", "num_epochs=2", "tracking.progress=false"]
    config = load_config(CONF / "reward_tiny.yaml", [*fixed, *overrides], RewardTrainingConfig)
    told: list[Event] = []
    pairs = [Pair(np.array([10 + i], np.int32), np.array([20 + i], np.int32)) for i in range(7)]
    loop = RewardTraining(
        config=config,
        learner=Model("reward model", told, 0.5, {"loss": 1.0}),  # type: ignore[arg-type]
        pairs=pairs[:5],
        held_out={"": pairs[5:]},
        tracker=tracker_of(config, run_dir, 6),
        checkpoints=CheckpointStore(run_dir, keep=9),
    )
    return loop, told


def lines(loop: Run[Any], name: str) -> list[dict[str, Any]]:
    """What the run has recorded, without times."""
    loop.tracker.close()
    rows = map(json.loads, (loop.tracker.run_dir / f"{name}.jsonl").read_text().splitlines())
    timed = ("time/", "checkpoint/", "wall_s", "tokens_per_s", "eps", "bottleneck")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]


# ---- the order of things


ONE_STEP = ["num_steps=1", "algorithm.whiten_advantages=false", "algorithm.lam=1", "algorithm.kl_estimator=k1"]


def test_a_step_asks_the_roles_in_this_order(tmp_path: Path) -> None:
    loop, told = policy_run(tmp_path, *ONE_STEP)
    loop.run()
    (first, second), *_ = [event[1] for event in told if event[0] == "samples" and not event[3]]
    prompt_of = {10 + row: row for row in range(NUM_PROMPTS)}
    evaluated = [("samples", [0, 1], 1, True, []), ("judged in an evaluation", [[0, 40], [1, 40]])]
    scored = next(event[1] for event in told if event[0] == "policy scores")
    assert [token for token in scored["tokens"] if token in prompt_of], "the prompts' tokens are there"
    groups = [scored["tokens"][:3], scored["tokens"][3:]]
    learnt = next(event[2] for event in told if event[0] == "policy learns")
    assert told == [
        ("published", 0, 0),
        *evaluated,
        ("samples", [first, second], 1, False, []),
        ("judged", [[[first, 40]]]),
        ("referred", [groups[0]]),
        ("judged", [[[second, 40]]]),
        ("referred", [groups[1]]),
        ("sleeps",),
        ("policy scores", scored),
        ("critic scores", scored),
        ("policy has scored",),
        ("critic has scored",),
        ("critic learns", 0, learnt),
        ("policy learns", 0, learnt),
        ("policy has learnt",),
        ("critic has learnt",),
        ("published", 1, 1),
        *evaluated,
        ("policy is saved",),
        ("critic is saved",),
    ]


def test_what_is_learnt_from_is_what_the_roles_said(tmp_path: Path) -> None:
    loop, told = policy_run(tmp_path, *ONE_STEP, "tracking.completions_every_steps=1")
    loop.run()
    learnt = next(event[2] for event in told if event[0] == "policy learns")
    assert learnt["rewards"] == [1.0, 0.0]
    assert learnt["ref_logprobs"] == [-1.5] * 4
    assert learnt["old_logprobs"] == pytest.approx([-1.0, -0.999, -0.998, -0.997])
    assert learnt["values"] == pytest.approx([0.25, 0.251, 0.252, 0.253])
    assert learnt["compared"] == [True] * 4
    # with gamma = lam = 1, a return is the sum of what follows: -0.1 x (log p - log p_ref), and the reward at the end
    assert learnt["returns"] == pytest.approx([0.8999, 0.9499, -0.1005, -0.0503])
    gains = [value - baseline for value, baseline in zip(learnt["returns"], learnt["values"], strict=True)]
    assert learnt["advantages"] == pytest.approx(gains)
    shown = [(row["reward"], row["advantage"]) for row in lines(loop, "completions")]
    assert shown == [(1, pytest.approx(gains[0])), (0, pytest.approx(gains[2]))], "of each completion's first token"


def test_without_a_critic_the_policy_learns_at_once_what_the_reference_scored(tmp_path: Path) -> None:
    settings = ["num_steps=1", "algorithm.group_size=2", "critic.warmup_steps=1"]
    loop, told = policy_run(tmp_path, *settings, recipe="grpo_tiny")
    loop.run()
    prompts = next(event[1] for event in told if event[0] == "samples" and not event[3])
    referred = [tokens for event in told if event[0] == "referred" for tokens in event[1]]
    ((_, step, learnt),) = [event for event in told if event[0] == "policy learns"]
    assert [tokens[1:3] + tokens[4:] for tokens in referred] == [[prompt, 40, prompt, 41] for prompt in prompts]
    assert (step, learnt["tokens"]) == (0, referred[0] + referred[1])
    assert learnt["ref_logprobs"] == [-1.5] * 8
    assert not {"values", "returns", "old_logprobs"} & learnt.keys()


def test_a_policy_with_adapters_is_asked_for_the_references_log_probabilities(tmp_path: Path) -> None:
    loop, told = policy_run(tmp_path, "num_steps=1", "algorithm.group_size=2", recipe="grpo_lora_tiny")
    loop.run()
    done = [event[0] for event in told]
    assert "referred" not in done and done.count("policy has scored as the reference") == 1
    assert done.index("sleeps") < done.index("policy scores as the reference"), "the learner has its memory then"
    ((_, _, learnt),) = [event for event in told if event[0] == "policy learns"]
    assert learnt["ref_logprobs"] == pytest.approx([-0.5 - 0.001 * i for i in range(8)])


def test_steps_are_recorded_with_their_own_numbers(tmp_path: Path) -> None:
    loop, _ = policy_run(tmp_path, "num_steps=4", "eval_every_steps=3", "critic.warmup_steps=1")
    loop.run()
    rows = lines(loop, "metrics")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row.get("loss") for row in rows] == [None, 1, 2, 3], "only the critic learns in step 1"
    assert [row["critic/loss"] for row in rows] == [10, 20, 30, 40]
    assert [row["num_tokens"] for row in rows] == [6, 12, 18, 24]
    assert [row["staleness/max"] for row in rows] == [0] * 4
    assert [row["reward"] for row in rows] == [0.5] * 4, "one even prompt of two, in each step"
    assert [row["step"] for row in lines(loop, "completions")] == [2, 2, 4, 4]
    assert [(row["step"], row["eval/reward"]) for row in lines(loop, "eval")] == [(0, 0.5), (3, 0.5), (4, 0.5)]


def test_epochs_of_pairs_have_orders_of_their_own_and_steps_their_numbers(tmp_path: Path) -> None:
    loop, told = reward_run(tmp_path, "eval_every_steps=4")
    loop.run()
    learnt = [event for event in told if event[0] == "reward model learns"]
    assert [event[1] for event in learnt] == list(range(6))
    texts = [event[2]["tokens"][::2] for event in learnt]  # each is followed by the token that is not read
    assert [len(text) for text in texts] == [4, 4, 2] * 2
    epochs = [[token for text in texts[at : at + 3] for token in text] for at in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    assert epochs[0] != epochs[1]
    assert [event[1]["tokens"][::2] for event in told if event[0] == "reward model scores"] == [[15, 25, 16, 26]] * 3
    rows = lines(loop, "metrics")
    assert [(row["step"], row["loss"], row["num_tokens"]) for row in rows] == [
        (step, step, tokens) for step, tokens in enumerate([4, 8, 10, 14, 18, 20], start=1)
    ]
    # scores are 0.5, 0.501, 0.502, 0.503 before anything is learnt: the first of a pair is behind by 0.001
    centring = 0.01 * (1.001**2 + 1.005**2) / 2
    first = lines(loop, "eval")[0]
    assert first["eval/loss"] == pytest.approx(math.log(1 + math.exp(0.001)) + centring)
    assert (first["eval/accuracy"], first["eval/margin"]) == (0, pytest.approx(-0.001, rel=1e-3))


def saved_and_evaluated(loop: Run[Any]) -> tuple[list[int], list[int]]:
    loop.run()  # type: ignore[attr-defined]
    return loop.checkpoints.steps(), sorted(loop.evaluations)


@pytest.mark.parametrize(
    ("overrides", "saved", "evaluated"),
    [
        ([], [6], [0, 6]),
        (["checkpoint.every_steps=2", "eval_every_steps=4"], [2, 4, 6], [0, 4, 6]),
        (["checkpoint.every_steps=4", "eval_every_steps=6"], [4, 6], [0, 6]),
    ],
)
@pytest.mark.parametrize("start", [policy_run, reward_run])
def test_checkpoints_and_evaluations_come_when_they_are_due_and_at_the_end(
    tmp_path: Path, start: Callable[..., Any], overrides: list[str], saved: list[int], evaluated: list[int]
) -> None:
    length = ["num_steps=6"] if start is policy_run else []
    loop, told = start(tmp_path, *length, *overrides)
    assert saved_and_evaluated(loop) == (saved, evaluated)
    assert len([event for event in told if event[0].endswith("is saved")]) == len(saved) * len(loop.trained())


@pytest.mark.parametrize(("every", "saved"), [("null", [3, 5, 6]), ("0", [6]), ("4", [4, 6])])
@pytest.mark.parametrize("start", [policy_run, reward_run])
def test_where_nothing_else_is_asked_for_a_checkpoint_comes_every_ten_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Any], every: str, saved: list[int]
) -> None:
    """Steps take 250 s, the fourth 400 s: 750 s after the run began, and 650 s after that."""
    clock = Clock(monkeypatch)
    steps = ["num_steps=6"] if start is policy_run else []
    loop, _ = start(tmp_path, *steps, f"checkpoint.every_steps={every}")

    def take(seconds: float) -> None:
        clock.now_s += seconds

    loop.trained()["learner"].before = {step: partial(take, 400 if step == 3 else 250) for step in range(6)}
    assert saved_and_evaluated(loop) == (saved, [0, 6])


@pytest.mark.parametrize("start", [policy_run, reward_run])
def test_a_request_to_stop_ends_the_run_after_its_step_with_a_checkpoint(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    loop, _ = start(tmp_path, *(["num_steps=6"] if start is policy_run else []))
    log_step = loop.tracker.log_step

    def stop(step: int, *arguments: Any, **counts: Any) -> None:
        log_step(step, *arguments, **counts)
        loop.stop_requested = step == 2

    loop.tracker.log_step = stop
    assert saved_and_evaluated(loop) == ([2], [0])


def test_a_sampler_that_differs_is_noted_and_beyond_the_bound_ends_the_run_unpublished(tmp_path: Path) -> None:
    notes: list[str] = []
    loop, told = policy_run(tmp_path, "num_steps=5", gate=SamplingGate(warn=0.3, stop=0.7))
    loop.tracker.note = notes.append  # type: ignore[method-assign]
    with pytest.raises(SamplingError, match="weight version 3"):
        loop.run()  # 0.2 nats, then 0.4, 0.6, 0.8
    assert [note.partition(":")[0] for note in notes] == ["weight version 1", "weight version 2"]
    assert [event[1] for event in told if event[0] == "published"] == [0, 1, 2, 3]
    assert loop.checkpoints.steps() == []


def test_what_a_step_compared_is_not_compared_again_until_it_is_due(tmp_path: Path) -> None:
    every_third = ["rollout.logprobs=false", "checks.logprob_every_steps=3", "checks.logprob_groups=1"]
    loop, told = policy_run(tmp_path, "num_steps=5", *every_third)
    loop.run()
    asked = [event[4] for event in told if event[0] == "samples" and not event[3]]
    assert asked == [[0], [], [], [1], []], "another group each time"


# ---- going on from a checkpoint


PPO = ["algorithm.kl_target=1", "algorithm.kl_horizon=10"]
STALE = "rollout.max_staleness=1"
COMMON = ["checkpoint.every_steps=3", "eval_every_steps=1", "checks.on_nonfinite=skip"]
RUNS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "ppo": (policy_run, PPO),
    "ppo, stale": (policy_run, [*PPO, STALE]),
    "grpo": (lambda *a: policy_run(*a, "algorithm.group_size=2", recipe="grpo_tiny"), []),
    "grpo, stale": (lambda *a: policy_run(*a, "algorithm.group_size=2", recipe="grpo_tiny"), [STALE]),
    "reward": (reward_run, []),
}


def without(event: Event, names: set[str]) -> Event:
    """The event, with batches that lack these tensors."""
    return tuple({k: v for k, v in x.items() if k not in names} if isinstance(x, dict) else x for x in event)


def end_state(loop: Run[Any]) -> dict[str, Any]:
    """What a checkpoint would hold, without what depends on the process."""
    state = json.loads(json.dumps(loop.state_dict()))
    return state | {"tracker": {k: v for k, v in state["tracker"].items() if k not in OF_THIS_PROCESS}}


@pytest.mark.parametrize("kind", RUNS)
def test_a_resumed_run_asks_what_a_straight_one_does(tmp_path: Path, kind: str) -> None:
    start, overrides = RUNS[kind]
    overrides = [*COMMON, *overrides, *([] if kind == "reward" else ["num_steps=6"])]

    def prepared(name: str) -> tuple[Any, list[Event]]:
        loop, told = start(tmp_path / name, *overrides)
        loop.trained()["learner"].skips = (1,)
        return loop, told

    straight, expected = prepared("straight")
    straight.run()
    names = list(straight.trained())
    after_third = [i for i, event in enumerate(expected) if event[0].endswith("is saved")][len(names) - 1] + 1

    broken, _ = prepared("run")
    broken.trained()["learner"].before[4] = lose
    with pytest.raises(RoleLostError):
        broken.run()
    broken.tracker.close()
    resumed, told = prepared("run")
    resumed.run()

    loaded = [(event[0].replace("saved", "loaded"),) for event in expected[after_third - len(names) : after_third]]
    assert told[: len(loaded)] == loaded
    told, expected = told[len(loaded) :], expected[after_third:]
    if kind != "reward":
        assert told.pop(0) == ("published", 3, 3), "before anything is sampled"
    if STALE in overrides:
        (at, first), *_ = [(i, event) for i, event in enumerate(told) if event[0] == "samples"]
        (then,) = [event for event in expected if event[0] == "samples" and event[1] == first[1][2:]]
        assert first[2:] == then[2:] and len(first[1]) == 4, "what was under way, and as much as the straight run"
        told[at] = then
        batch, stale = (next(e[2] for e in events if e[0] == "policy learns") for events in (told, expected))
        assert set(batch["versions"]) == {3} and set(stale["versions"]) == {2}
    ignored = SAMPLED_LATER if STALE in overrides else set()
    assert [without(event, ignored) for event in told] == [without(event, ignored) for event in expected]
    assert end_state(resumed) == end_state(straight)
    assert sorted(resumed.evaluations) == list(range(7)) and resumed.skipped.total == 1
    if kind.startswith("ppo"):
        assert resumed.algorithm.state_dict()["beta"] != resumed.config.algorithm.beta, "it was adapted"
    stale_metrics = {"staleness/max", "staleness/mean", DIFFERENCE} if STALE in overrides else set()
    for name in ("metrics", "eval"):
        ours, theirs = (lines(loop, name) for loop in (resumed, straight))
        assert [without((row,), stale_metrics) for row in ours] == [without((row,), stale_metrics) for row in theirs]


# ---- checkpoints that are written while the run goes on


def saved_at(run_dir: Path, step: int) -> dict[str, Any]:
    """What the checkpoint of a step holds of the driver's state, without what depends on the process and on time."""
    state = read_state(run_dir / "checkpoints" / f"step-{step:06d}")
    timed = {"tracker": {k: v for k, v in state["tracker"].items() if k not in OF_THIS_PROCESS}}
    return state | timed


@pytest.mark.parametrize("start", [policy_run, reward_run])
@pytest.mark.parametrize(
    ("every", "complete", "saved"), [(2, [[], [], [], [], [2], [2]], [2, 4, 6]), (4, [[]] * 6, [4, 6])]
)
def test_a_checkpoint_counts_when_all_roles_have_written_theirs_and_is_as_of_its_step(
    tmp_path: Path, start: Callable[..., Any], every: int, complete: list[list[int]], saved: list[int]
) -> None:
    overrides = [
        f"checkpoint.every_steps={every}",
        "eval_every_steps=1",
        *(["num_steps=6"] if start is policy_run else []),
    ]
    quick, _ = start(tmp_path / "quick", *overrides)
    quick.run()
    slow, _ = start(tmp_path / "slow", *overrides)
    last = list(slow.trained().values())[-1]
    last.slow_to_save = True
    seen: list[list[int]] = []
    last.before = {step: lambda: seen.append(slow.checkpoints.steps()) for step in range(6)}
    slow.run()
    assert seen == complete, "each is there when the next is asked for"
    assert slow.checkpoints.steps() == saved
    for step in saved:
        assert saved_at(tmp_path / "slow", step) == saved_at(tmp_path / "quick", step)


def test_what_writing_a_checkpoint_took_is_in_the_record_of_the_step_after(tmp_path: Path) -> None:
    loop, _ = policy_run(tmp_path, "num_steps=4", "checkpoint.every_steps=2")
    loop.run()
    rows = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    names = ("checkpoint/write_s", "checkpoint/bytes")
    assert [[row.get(name) for name in names] for row in rows] == [[None, None]] * 2 + [[12, 2]] + [[None, None]]


@pytest.mark.parametrize(
    ("error", "saved"),
    [
        (SamplingError("differs"), [2, 4]),
        (DeadlineError("learner[0]: still busy"), [2]),
        (GpuMemoryError("learner[0]: out of GPU memory"), [2]),  # for which the other ranks wait
    ],
)
def test_a_run_that_fails_leaves_its_last_checkpoint_complete_unless_a_role_hangs(
    tmp_path: Path, error: Exception, saved: list[int]
) -> None:
    loop, _ = policy_run(tmp_path, "num_steps=6", "checkpoint.every_steps=2")

    def fail() -> None:
        raise error

    model = loop.trained()["critic"]
    model.slow_to_save, model.before = True, {4: fail}  # type: ignore[attr-defined]
    with pytest.raises(type(error)), loop.completing_saves():
        loop.run()
    assert loop.checkpoints.steps() == saved


def test_what_some_of_the_roles_have_saved_is_no_checkpoint(tmp_path: Path) -> None:
    loop, _ = policy_run(tmp_path, "num_steps=6", "checkpoint.every_steps=2")
    critic: Any = loop.trained()["critic"]
    critic.before = {3: lambda: setattr(critic, "save", lambda directory: lose())}
    with pytest.raises(RoleLostError), loop.completing_saves():
        loop.run()
    assert loop.checkpoints.steps() == [2]


def test_a_run_that_loses_a_role_that_was_still_writing_goes_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    overrides = ["num_steps=6", "checkpoint.every_steps=2"]
    loop, _ = policy_run(tmp_path, *overrides)
    critic: Any = loop.trained()["critic"]
    critic.slow_to_save = True

    def die() -> None:
        critic.finish_save = lambda wait: lose()
        raise RoleLostError("critic[0] died while updating")

    critic.before = {4: die}
    with pytest.raises(RoleLostError, match="updating"), loop.completing_saves():
        loop.run()
    loop.tracker.close()
    files = sorted(path.name for path in loop.checkpoints.directory.iterdir())
    assert files == [".partial-000004", "step-000002"]
    (loop.checkpoints.directory / ".removed" / "step-000001").mkdir(parents=True)
    again, _ = policy_run(tmp_path, *overrides)
    again.resume()
    assert again.step == 2
    assert [path.name for path in again.checkpoints.directory.iterdir()] == ["step-000002"], "the leftover is gone"


def test_a_resumed_run_knows_its_best_model(tmp_path: Path) -> None:
    def start(num_steps: int) -> Driver:
        loop, _ = policy_run(tmp_path, f"num_steps={num_steps}")
        loop.best = BestModel("eval/reward", tmp_path / "best", save=Path.mkdir)
        return loop

    first = start(1)
    first.run()
    first.tracker.close()
    assert first.best is not None and first.best.best["step"] == 0, "rewards are always equal"
    resumed = start(2)
    resumed.run()
    assert resumed.best is not None and resumed.best.best == first.best.best
