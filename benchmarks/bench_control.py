"""What a step costs the driver: the real pool, scheduler, publish protocol and batch making, around simulated workers.

python -m benchmarks.bench_control [--workers 64 256 1024] [--groups 1024 8192 65536] [--deaths 4] [--out result.json]
python -m benchmarks.bench_control --tiny                     # seconds; what the test runs
python -m benchmarks.bench_control --profile --workers 1024 --groups 8192

A row is a pool of so many workers, a step of so many groups of 8, all in flight together. CPU seconds of the driver's
process per step, the mean over all steps but the first, by part:

hand_out   groups to workers, and their requests to Ray       schedule   which worker gets which group
listen     what came back, and the look at every worker       score      groups to reward workers and back
publish    the protocol, four calls per worker                batch      packing, advantages, metrics
send       planning the update, and each rank's share of the batch to it

Ray itself is not in them: ``calls``, ``gets``, ``waits`` and ``waited_for`` (references that ray.wait was given) count
what it is asked for. Arguments and answers are pickled, as Ray does, in the caller's time; prompts and completions hold
--tokens tokens. The workers' time is simulated, and passes no faster than this machine's while the driver computes:
figures of a busy machine are too high.
"""

import argparse
import cProfile
import math
import pstats
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from actors.group import ActorGroup, Member
from actors.proxies import LearnerGroup, Replicas, RewardGroup
from actors.rollouts.engine import Completion, Ready, Request, group_of
from actors.rollouts.engine_loop import Report
from actors.rollouts.factory import Launch
from actors.rollouts.pool import RolloutPool
from actors.rollouts.scheduler import Scheduler
from actors.weights.transports import make_transport
from benchmarks.common import ROOT, Row, show, write_json
from benchmarks.simulation import Actor, Meter, Ref, Simulation
from rlhf.algorithms import make_algorithm
from rlhf.batch import Prompt, Rollout
from rlhf.config import Config
from rlhf.recipes import load_config
from rlhf.shares import PolicyPlanner
from rlhf.stream import GroupStream
from rlhf.tracking import rollout_metrics
from rlhf.training.weights import Layout, TensorSpec

GROUP = 8  # completions
MEDIAN_S, SPREAD, LONGEST_S = 20.0, 0.7, 60.0  # of the time that a completion takes: lognormal, cut off
UPDATE_S = 20.0  # in which the driver waits for the learner
START_S = 30.0  # until a worker that replaces another is up
LATENCY_S = 0.002  # of a call that does not wait
BUCKETS, TENSORS = 60, 340  # of the weights: a 7B model
HIDDEN_SIZE = 4096  # of the same model
PARTS = (
    (RolloutPool, "submit", "hand_out"),
    (RolloutPool, "_dispatch", "hand_out"),
    (Scheduler, "dispatch", "schedule"),
    (Scheduler, "take_over", "schedule"),
    (RolloutPool, "_listen", "listen"),
    (RolloutPool, "next_groups", "listen"),
    (RewardGroup, "score_groups", "score"),
    (RolloutPool, "publish", "publish"),
)
COLUMNS = ("hand_out", "schedule", "listen", "score", "publish", "batch", "send")


class RolloutWorker(Actor):
    """A rollout actor whose completions take random times, side by side."""

    def __init__(self, simulation: Simulation, draw: random.Random, tokens: int) -> None:
        super().__init__(
            simulation, begin_update=Ready(1), receive_session=[list(range(BUCKETS))], start="10.0.0.1", abort=None
        )
        self._draw, self._tokens, self._version = draw, tokens, -1
        self._running: dict[str, set[str]] = defaultdict(set)  # keys by group
        self._finished: list[Completion] = []
        self._whole = False  # a group has finished since the last report
        self._collecting: Ref | None = None
        self._generated = 0

    def serve_submit(self, ref: Ref, requests: list[Request]) -> None:
        for request in requests:
            self._running[group_of(request.key)].add(request.key)
            duration_s = min(LONGEST_S, MEDIAN_S * math.exp(SPREAD * self._draw.gauss(0.0, 1.0)))
            self._simulation.after(duration_s, lambda key=request.key: self._finish(key))
        self.reply(ref, None, LATENCY_S)

    def serve_abort(self, ref: Ref, keys: list[str]) -> None:
        for key in keys:
            self._running[group_of(key)].discard(key)
        self.reply(ref, None, LATENCY_S)

    def serve_collect(self, ref: Ref, wait_s: float) -> None:
        self._collecting = ref
        if self._whole:
            self._report(ref)
        else:
            self._simulation.after(wait_s, lambda: self._report(ref))

    def serve_commit(self, ref: Ref, version: int) -> None:
        self._version = version
        self.reply(ref, None, LATENCY_S)

    def _finish(self, key: str) -> None:
        running = self._running[group_of(key)]
        if self._dead or key not in running:
            return
        running.remove(key)
        length = self._draw.randint(self._tokens // 2, 3 * self._tokens // 2)
        tokens = [self._draw.randrange(32000) for _ in range(length)]
        self._finished.append(Completion(key, tokens, "stop", None, np.full(length, self._version, np.int32)))
        self._generated += length
        self._whole = self._whole or not running
        if self._whole and self._collecting is not None:
            self._report(self._collecting)

    def _report(self, ref: Ref) -> None:
        if ref is self._collecting:
            self._collecting = None
            self.reply(ref, Report(self._finished, self._generated, 0.0), LATENCY_S)
            self._finished, self._whole = [], False


class Factory:
    """Implements ``actors.rollouts.factory.WorkerFactory``."""

    def __init__(self, simulation: Simulation, draw: random.Random, tokens: int) -> None:
        self._simulation, self._draw, self._tokens = simulation, draw, tokens
        self._workers: dict[int, RolloutWorker] = {}
        self.start_s = 0.0
        self.num_places = None

    def launch(self, worker: int, kind: str) -> Launch:
        actor = self._workers[worker] = RolloutWorker(self._simulation, self._draw, self._tokens)
        starting: Any = Ref()
        actor.reply(starting, "10.0.0.1", self.start_s)
        return Launch(actor, starting)

    def has_place(self, worker: int) -> bool:
        return True

    def end(self, worker: int) -> None:
        self._workers.pop(worker).die()

    def kill_one(self) -> None:
        """As a node that fails does."""
        self._draw.choice(list(self._workers.values())).die()


class Prompts:
    """An endless stream of prompts."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._next = tokens, 0

    def take(self, count: int) -> list[Prompt]:
        ids = range(self._next, self._next + count)
        self._next += count
        return [Prompt(i, [i % 32000] * self._tokens, f"prompt {i}", columns={"answer": str(i)}) for i in ids]


class LearnerStore:
    """Learner rank 0's part in a weight session."""

    def __init__(self) -> None:
        self._store: Any = None

    def open(self, timeout_s: float) -> int:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port


def layout() -> Layout:
    specs = [TensorSpec(f"model.layers.{i}.weight", "bfloat16", (64, 64), (64, 64), 0, 0, 8192) for i in range(TENSORS)]
    return [tuple(specs[i::BUCKETS]) for i in range(BUCKETS)]


def group(role: str, actors: Sequence[Actor]) -> ActorGroup:
    return ActorGroup([Member(actor, role, rank, "127.0.0.1") for rank, actor in enumerate(actors)])


def score(groups: list[list[Rollout]]) -> list[dict[str, list[float]]]:
    return [{"length": [float(len(rollout.token_ids)) for rollout in of_group]} for of_group in groups]


class Control:
    """The mailbox of `rlhf scale`: looks at every worker twice a second, and asks for nothing."""

    def __init__(self) -> None:
        self._looked_s = 0.0

    def poll(self, status: Callable[[], list[dict[str, Any]]], wanted: dict[str, int]) -> dict[str, int]:
        if time.monotonic() - self._looked_s > 0.5:
            self._looked_s = time.monotonic()
            status()
        return {}


class Run:
    """The driver's loop over simulated roles."""

    def __init__(self, config: Config, args: argparse.Namespace, simulation: Simulation, meter: Meter) -> None:
        self.simulation, self.meter, self._draw = simulation, meter, random.Random(0)
        self._factory = Factory(self.simulation, self._draw, args.tokens)
        factory: Any = self._factory
        control: Any = Control()
        self._pool = RolloutPool(config, factory, control, shares_gpus=False, note=lambda text: None)
        store = LearnerStore()
        planner = PolicyPlanner(
            num_ranks=config.learner.num_ranks,
            token_budget=config.learner.micro_batch_tokens,
            hidden_size=HIDDEN_SIZE,
            config=config.algorithm,
            seed=config.seed,
            max_completion_tokens=config.rollout.max_completion_tokens,
        )
        learner = group("learner", [self._learner(store, planner) for _ in range(config.learner.num_ranks)])
        self._learner_group = LearnerGroup(learner, config.timeouts)
        self._transport = make_transport(learner, "broadcast")
        scorers = [Actor(self.simulation, score=score) for _ in range(config.reward.num_workers)]
        judges = Replicas(group("reward", scorers), config.timeouts, "computing rewards")
        reward = RewardGroup([judges], {"length": 1.0})
        prompts: Any = Prompts(args.tokens)
        self._stream = GroupStream(prompts, self._pool, reward, None, config, self.meter.part)
        self._algorithm = make_algorithm(config.algorithm)
        self._deaths = args.deaths

    def _learner(self, store: LearnerStore, planner: PolicyPlanner) -> Actor:
        return Actor(
            self.simulation,
            planner=planner,
            weight_layout=layout(),
            host_rendezvous=store.open,
            join_weights={},
            send_weights=list(range(BUCKETS)),
            update={"loss": 0.0},
        )

    def start(self) -> None:
        self._pool.launch()
        self._pool.await_started()
        self._pool.connect(self._transport)
        self._pool.publish(0)
        self._factory.start_s = START_S

    def close(self) -> None:
        self._pool.close()

    def step(self, step: int) -> Row:
        """One step of the driver's loop: what it cost."""
        simulation, meter = self.simulation, self.meter
        for _ in range(self._deaths):
            simulation.after(self._draw.uniform(0.0, LONGEST_S), self._factory.kill_one)
        meter.take()
        simulation.counts.clear()
        started_s, real_s = simulation.now_s(), time.perf_counter()
        with meter.part("batch"):
            sampled = self._stream.next_batch(step)
            sampled.scores.check_abstained(1.0)
            batch, metrics = self._algorithm.assign_advantages(sampled.packed.with_(rewards=sampled.scores.rewards))
            with meter.part("send"):
                metrics |= self._learner_group.update(batch, step).result()
            with meter.part("simulation"):
                simulation.sleep(UPDATE_S)
            metrics |= self._pool.publish(step + 1)
            metrics |= rollout_metrics(sampled.rollouts, sampled.scores, group_size=GROUP)
        spent, counts = meter.take(), Counter(simulation.counts)
        waits = counts.pop("wait"), counts.pop("waited for")
        gets, puts = counts.pop("get"), counts.pop("put", 0)
        return {
            "driver_s": sum(spent[part] for part in COLUMNS),
            **{f"{part}_s": spent[part] for part in COLUMNS},
            "step_s": simulation.now_s() - started_s,
            "real_s": time.perf_counter() - real_s,
            "calls": sum(counts.values()),
            "collects": counts["collect"],
            "gets": gets,
            "puts": puts,
            "waits": waits[0],
            "waited_for": waits[1],
            "replaced": metrics["pool/replaced_workers"],
        }


@contextmanager
def measured(meter: Meter, simulation: Simulation, profile: cProfile.Profile | None) -> Iterator[None]:
    """Counts the parts; the pool's thread is profiled by itself, since a profile is of one thread."""
    with ExitStack() as patches:
        for owner, name, part in PARTS:
            function = meter.wrap(getattr(owner, name), part)
            if name == "next_groups":
                function = waiting(function, simulation)
            if name == "_listen" and profile is not None:
                function = profiled(function, profile)
            patches.enter_context(mock.patch.object(owner, name, function))
        yield


def waiting(function: Callable[..., Any], simulation: Simulation) -> Callable[..., Any]:
    def wait(*args: Any) -> Any:
        with simulation.idle():
            return function(*args)

    return wait


def profiled(function: Callable[..., Any], profile: cProfile.Profile) -> Callable[..., Any]:
    return lambda *args: profile.runcall(function, *args)


def bench(workers: int, groups: int, args: argparse.Namespace) -> Row:
    """The mean step of a pool of ``workers`` with ``groups`` groups per step."""
    config = load_config(
        ROOT / "conf" / "grpo_tiny.yaml",
        [
            *(f"rollout.num_workers={workers}", f"algorithm.prompts_per_step={groups}", "reward.num_workers=16"),
            *(f"algorithm.group_size={GROUP}", f"learner.num_ranks={args.ranks}", f"num_steps={args.steps}"),
            *("timeouts.generate_s=100000", "rollout.max_num_seqs=512", "rollout.max_failures=1000"),
        ],
    )
    meter = Meter()
    simulation = Simulation(meter, LATENCY_S)
    listener = cProfile.Profile() if args.profile else None
    driver = cProfile.Profile() if args.profile else None
    with simulation, measured(meter, simulation, listener):
        run = Run(config, args, simulation, meter)
        run.start()
        try:
            steps = [run.step(0)]
            for step in range(1, args.steps):
                steps.append(driver.runcall(run.step, step) if driver else run.step(step))
        finally:
            run.close()
    for profile in filter(None, (driver, listener)):
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    counted = steps[1:]
    means = {name: sum(step[name] for step in counted) / len(counted) for name in counted[0] if name != "replaced"}
    return {"workers": workers, "groups": groups, **means, "replaced": counted[-1]["replaced"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--groups", type=int, nargs="+", default=[1024, 8192, 65536], help="in a step, each of 8")
    parser.add_argument("--tokens", type=int, default=64, help="mean length of a completion, and length of a prompt")
    parser.add_argument("--ranks", type=int, default=64, help="of the learner")
    parser.add_argument("--deaths", type=int, default=4, help="workers that die in each step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="of driver and listening thread")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.tiny:
        vars(args).update(workers=[4, 16], groups=[32], tokens=8, ranks=2, deaths=1, steps=2)
    rows = []
    for workers in args.workers:
        for groups in args.groups:
            rows.append(bench(workers, groups, args))
            print(rows[-1], flush=True)
    show("control plane: CPU seconds of the driver per step", rows)
    write_json(args.out, rows, tokens=args.tokens, ranks=args.ranks, deaths=args.deaths)


if __name__ == "__main__":
    main()
