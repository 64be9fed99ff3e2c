"""Whole runs on the tiny model: reward rises, what a run leaves behind, stopping, resuming, and dying with a name."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.cluster import reward_weights
from actors.group import ActorGroup, Deadline
from actors.proxies import Replicas, RewardGroup
from actors.scorers import RewardActor
from benchmarks.common import actor_pids, python_module
from jobs.train import train
from rlhf.batch import Prompt, Rollout, pack
from rlhf.errors import ActorError, CheckpointError, ConfigError, DeadlineError, SamplingError

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS, SAVED = 20, 18  # of the whole run; it writes a checkpoint after the latter, and at its end


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole_run(ray_session, tiny_config) -> tuple[Path, dict]:
    """A run: its directory, and what it returned."""
    steps = (f"num_steps={NUM_STEPS}", f"checkpoint.every_steps={SAVED}", "tracking.completions_every_steps=10")
    config = tiny_config(*steps)
    summary = train(config)
    return Path(config.run_dir), summary


def test_grpo_learns_and_leaves_a_whole_run_directory(whole_run: tuple[Path, dict]) -> None:
    run_dir, summary = whole_run
    assert summary["eval_before"]["reward"] < 0.6
    assert summary["eval_after"]["reward"] > 0.75
    assert {**json.loads((run_dir / "summary.json").read_text()), "signal": 0} == summary
    assert summary["status"] == "completed"
    assert {"generate", "score", "update", "publish"} <= summary["phases"].keys()

    metrics = lines(run_dir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, NUM_STEPS + 1))
    compared = {
        m["step"]: m["sampling/logprob_difference_max"] for m in metrics if "sampling/logprob_difference_max" in m
    }
    assert list(compared) == [1, 9, 17], "every eighth step, and the first"
    assert max(compared.values()) < 2e-4, "a version samples as it scores"
    for name in (
        "reward",
        "rewards/even_tokens/mean",
        "kl",
        "entropy",
        "clip_ratio/region_mean",
        "frac_reward_zero_std",
    ):
        assert name in metrics[-1]
    assert {m["staleness/max"] for m in metrics} == {0}
    for role in ("learner", "reference", "reward", "rollout"):
        assert {0.1 < m[f"memory/{role}/host_gib"] < 20 for m in metrics} == {True}, role
    assert "memory/learner/gpu_gib" not in metrics[0], "of a process without a GPU"
    assert {line["step"] for line in lines(run_dir / "completions.jsonl")} == {10, 20}
    assert list((run_dir / "tensorboard").iterdir())

    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    ids = tokenizer("red door", return_tensors="pt")
    completion = model.generate(**ids, max_new_tokens=24, do_sample=False, eos_token_id=-1)[
        0, ids["input_ids"].shape[1] :
    ]
    assert (completion % 2 == 0).float().mean() > 0.75, "the saved model is the one that learned"


def test_resumed_run_repeats_the_uninterrupted_one(whole_run: tuple[Path, dict], tiny_config, capfd) -> None:
    whole_dir, whole = whole_run
    stopped = tiny_config(f"num_steps={NUM_STEPS}")
    run_dir = Path(stopped.run_dir)
    shutil.copytree(whole_dir / "checkpoints" / f"step-{SAVED:06d}", run_dir / "checkpoints" / f"step-{SAVED:06d}")
    shutil.copy(whole_dir / "metrics.jsonl", run_dir)  # as if it had died in the last step
    with pytest.raises(CheckpointError, match=rf"step-{SAVED:06d} belongs to another run: seed 0 -> 1"):
        train(replace(stopped, seed=1))
    resumed = train(stopped)
    told = capfd.readouterr().out
    assert f"checkpoints/step-{SAVED:06d} (of {NUM_STEPS}); changed: " in told
    assert f"checkpoint.every_steps {SAVED} -> null" in told
    with pytest.raises(ConfigError, match=rf"already holds step {NUM_STEPS} of {NUM_STEPS}; raise num_steps"):
        train(stopped)
    expected, actual = lines(whole_dir / "metrics.jsonl"), lines(run_dir / "metrics.jsonl")
    assert [m["step"] for m in actual] == list(range(1, NUM_STEPS + 1))
    assert actual[:SAVED] == expected[:SAVED] and actual[SAVED:] != expected[SAVED:], "done again, and timed again"
    for ours, theirs in zip(actual[SAVED:], expected[SAVED:], strict=True):
        for name in ("reward", "loss", "grad_norm", "kl", "entropy", "num_tokens"):
            assert ours[name] == theirs[name], f"{name} at step {ours['step']}"
    for name in ("eval_before", "eval_after", "num_tokens", "steps"):
        assert resumed[name] == whole[name], name


@pytest.mark.long
def test_a_sampler_that_differs_from_the_learner_ends_the_run_before_anything_is_published(
    ray_session, tiny_config
) -> None:
    """vLLM is told another epsilon of the norms: the weights arrive, checksums and all, and what it says is wrong."""
    one_rank = ("learner.num_ranks=1", "algorithm.beta=0", "num_steps=3")
    config = tiny_config("rollout.engine_args={hf_overrides: {rms_norm_eps: 0.05}}", *one_rank)
    with pytest.raises(SamplingError, match=r"weight version 0: .* checks\.max_logprob_difference=0\.01"):
        train(config)
    assert not (Path(config.run_dir) / "checkpoints").exists()


def outward_interface() -> dict[str, str]:
    """What tells gloo to use an interface that other machines can reach, if there is one."""
    others = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(a.family == socket.AF_INET and not a.address.startswith("127.") for a in addresses)
    ]
    return {"GLOO_SOCKET_IFNAME": others[0]} if others else {}


def assert_out_of_reach(driver: int) -> None:
    """No process of a local run listens where another machine could connect."""
    processes = [psutil.Process(driver), *psutil.Process(driver).children(recursive=True)]
    open_at = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM:
                    open_at[one.laddr] = process.name()
    assert {"gcs_server", "raylet"} <= set(open_at.values())
    assert any("LearnerActor" in name for name in open_at.values())
    assert any("RolloutActor" in name for name in open_at.values())
    exposed = {at: name for at, name in open_at.items() if not at.ip.removeprefix("::ffff:").startswith("127.")}
    assert exposed == {}


def scale_from_another_shell(printed: str, environment: dict[str, str]) -> None:
    """With the address that the run prints, and the token that Ray made for it."""
    found = re.search(r"on the Ray cluster at (\S+)", printed)
    assert found, printed
    command = python_module("jobs.cli", "scale", "--run", "grpo_tiny", "--address", found[1])
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "grpo_tiny: wants 1 default" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_a_scheduler_s_sigterm_finishes_the_step_saves_and_says_how_to_go_on(
    tiny_model_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = [
        *python_module("jobs.cli", "train", "-c", "conf/grpo_tiny.yaml", f"model.path={tiny_model_dir}"),
        *(f"run_dir={tmp_path}", "num_steps=100000", "learner.num_ranks=1", "algorithm.beta=0", "placement.device=cpu"),
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | outward_interface()
    log, metrics = tmp_path / "log", tmp_path / "metrics.jsonl"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        ends = time.monotonic() + 150
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
            assert time.monotonic() < ends and process.poll() is None, log.read_text()
            time.sleep(0.2)
        assert_out_of_reach(process.pid)
        scale_from_another_shell(log.read_text(), environment)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does: to the whole foreground group
        else:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:  # as Slurm does: to all
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(number)
        process.wait(timeout=90)
    finally:
        process.kill()
    output = log.read_text()
    assert process.returncode == 128 + number, output
    assert "stopping at the end of this step" in output
    assert "resumes from there" in output
    done = lines(metrics)[-1]["step"]
    assert (tmp_path / "checkpoints" / f"step-{done:06d}" / "driver.json").is_file()
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "interrupted"


def test_replicas_divide_groups_and_answers_keep_their_order(ray_session, tiny_config) -> None:
    config, deadline = tiny_config(), Deadline(60, "timeouts.start_s")
    group = ActorGroup.locate("reward", [ray.remote(RewardActor).remote(config) for _ in range(2)], deadline).result()
    group.call("start", deadline=deadline, doing="starting").result()
    reward = RewardGroup([Replicas(group, config.timeouts, "computing rewards")], reward_weights(config))
    for size in (1, 1, 2, 5):  # whoever's turn it is
        groups = [
            [Rollout(Prompt(i, [5], "x"), 0, [2] * i + [3], np.zeros(i + 1, np.int32), "stop")] for i in range(size)
        ]
        scores = reward.score_groups(groups).result()
        assert [of_group.given for of_group in scores] == [{"even_tokens": [i / (i + 1)]} for i in range(size)]
        together = reward.score([rollout for group in groups for rollout in group]).result()
        assert together.rewards.tolist() == pytest.approx([i / (i + 1) for i in range(size)])
    group.kill()


JUDGE = """
import asyncio

arrived = 0
all_there = asyncio.Event()

async def judge(completion_ids):
    global arrived
    arrived += 1
    if arrived == 3:
        all_there.set()
    await asyncio.wait_for(all_there.wait(), timeout=20)
    return [float(len(ids)) for ids in completion_ids]
"""


def test_calls_wait_for_an_asynchronous_judge_together(ray_session, tiny_config, tmp_path) -> None:
    (tmp_path / "judges.py").write_text(JUDGE)
    functions = f"reward.functions=[{{path: {tmp_path}/judges.py:judge}}]"
    config, deadline = tiny_config(functions), Deadline(60, "timeouts.start_s")
    actor = ray.remote(RewardActor).options(max_concurrency=RewardActor.concurrent_calls).remote(config)
    group = ActorGroup.locate("reward", [actor], deadline).result()
    group.call("start", deadline=deadline, doing="starting").result()
    reward = RewardGroup([Replicas(group, config.timeouts, "computing rewards")], reward_weights(config))
    rollouts = [Rollout(Prompt(i, [5], "x"), 0, [3] * i, np.zeros(i, np.int32), "stop") for i in (1, 2, 3)]
    calls = [reward.score_groups([[rollouts[0]], [rollouts[1]]]), reward.score_groups([[rollouts[2]]])]
    assert [[of_group.given for of_group in call.result()] for call in calls] == [
        [{"judge": [1.0]}, {"judge": [2.0]}],
        [{"judge": [3.0]}],
    ]
    group.kill()


def test_reward_calls_overlap_in_a_cluster(live) -> None:
    _, cluster, _ = live
    handle = cluster.group("reward").members[0].handle

    def meet(actor: RewardActor) -> None:
        vars(actor).setdefault("meeting", threading.Barrier(2, timeout=20)).wait()

    ray.get([handle.__ray_call__.remote(meet) for _ in range(2)], timeout=60)


def test_a_dead_rank_is_named_at_once(ray_session, tiny_config) -> None:
    config, deadline = tiny_config(), Deadline(60, "timeouts.start_s")
    actor = ray.remote(RewardActor).remote(config)
    group = ActorGroup.locate("reward", [actor], deadline).result()
    group.call("start", deadline=deadline, doing="starting").result()
    reward = RewardGroup([Replicas(group, config.timeouts, "computing rewards")], reward_weights(config))
    member = group.members[0]
    pid = ray.get(member.handle.__ray_call__.remote(lambda actor: os.getpid()), timeout=30)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorError, match=r"reward\[0\] on \S+: died while computing rewards"):
        reward.score([Rollout(Prompt(0, [5], "x"), 0, [6], np.zeros(1, np.int32), "stop")]).result()


def test_scorers_that_die_are_replaced_on_the_spot(live) -> None:
    """And what was sent to the dead is scored by those in their places, as if nothing had happened."""
    config, _, roles = live
    rollouts = [Rollout(Prompt(0, [5], "x"), 0, [6, i], np.zeros(2, np.int32), "stop") for i in (7, 8)]
    batch = pack(rollouts)
    rewards, (logprobs,) = roles.reward.score(rollouts).result(), roles.reference.score([batch]).result()
    dead = [pid for actor in ("RewardActor", "ReferenceActor") for pid in actor_pids(config.name, actor)]
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    again = roles.reward.score(rollouts), roles.reference.score([batch])
    assert again[0].result().given == rewards.given
    assert (again[1].result()[0] == logprobs).all()
    alive = [pid for actor in ("RewardActor", "ReferenceActor") for pid in actor_pids(config.name, actor)]
    assert len(alive) == len(dead) and not set(alive) & set(dead)


def test_a_wait_that_is_too_long_names_who_and_which_key(live) -> None:
    _, cluster, _ = live
    member = cluster.group("reference").members[0]
    sleeping = member.handle.__ray_call__.remote(lambda actor: time.sleep(3))
    call = ActorGroup([member]).call("node", deadline=Deadline(0.5, "timeouts.score_s"), doing="scoring a batch")
    with pytest.raises(DeadlineError, match=r"reference\[0\] on .*still busy with scoring a batch.*timeouts\.score_s"):
        call.result()
    ray.get(sleeping, timeout=30)
