"""What a turn of an episode costs the driver: the real pool, scheduler and crew around simulated workers.

python -m benchmarks.bench_turns [--workers 8 64] [--episodes 4096] [--turns 4] [--out result.json]
python -m benchmarks.bench_turns --tiny                     # seconds; what the test runs

A row is so many rollout workers and --environments environment workers, and one step of --episodes episodes in groups
of 8, each of --turns turns of --tokens sampled and as many observed tokens. ``turns_per_s``: turns by CPU seconds of
the driver's process, Ray's own left out, as in bench_control; arguments and answers are pickled, as Ray does, in its
time.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.environments.crew import Crew
from actors.environments.episode_loop import EpisodeReport, EpisodeTask
from actors.rollouts.pool import RolloutPool
from actors.rollouts.scheduler import Scheduler
from actors.weights.transports import make_transport
from benchmarks.bench_control import GROUP, LATENCY_S, Control, Factory, LearnerStore, Prompts, group, layout, measured
from benchmarks.common import ROOT, Row, show, write_json
from benchmarks.simulation import Actor, Meter, Ref, Simulation
from rlhf.batch import Episode, Prompt, Rollout
from rlhf.environments.turns import TurnReply, TurnRequest
from rlhf.recipes import load_config

TOOL_S = 0.2  # between a reply and the next turn
BUCKETS = len(layout())
PARTS = (
    (RolloutPool, "_dispatch", "hand_out"),
    (Scheduler, "dispatch", "schedule"),
    (RolloutPool, "_listen", "listen"),
)


class EnvironmentWorker(Actor):
    """An environment actor whose episodes all have the same number of turns."""

    def __init__(self, simulation: Simulation, args: argparse.Namespace) -> None:
        super().__init__(simulation)
        self._args = args
        self._contexts: dict[str, list[int]] = {}
        self._prompts: dict[str, int] = {}
        self._turns: dict[str, int] = {}
        self._report = EpisodeReport()
        self._collecting: Ref | None = None

    def serve_open(self, ref: Ref, tasks: Sequence[EpisodeTask]) -> None:
        for task in tasks:
            self._contexts[task.key], self._turns[task.key] = list(task.prompt.token_ids), 0
            self._prompts[task.key] = len(task.prompt.token_ids)
            self._ask(task.key)
        self.reply(ref, None, LATENCY_S)

    def serve_answer(self, ref: Ref, replies: Sequence[tuple[str, TurnReply]]) -> None:
        for key, reply in replies:
            self._contexts[key] += reply.token_ids
            self._simulation.after(TOOL_S, lambda key=key: self._go_on(key))
        self.reply(ref, None, LATENCY_S)

    def serve_collect(self, ref: Ref, wait_s: float) -> None:
        self._collecting = ref
        self._simulation.after(0.0 if self._worth_reporting else wait_s, lambda: self._tell(ref))

    @property
    def _worth_reporting(self) -> bool:
        return bool(self._report.turns or self._report.finished)

    def _go_on(self, key: str) -> None:
        if self._turns[key] < self._args.turns:
            self._contexts[key] += [7] * self._args.tokens
            self._ask(key)
            return
        tail = self._contexts.pop(key)[self._prompts.pop(key) :]
        lengths = [self._args.tokens] * self._turns.pop(key)
        episode = Episode(np.ones(len(tail), bool), lengths, [0.0] * len(lengths), 1.0, "done", [], {})
        rollout = Rollout(Prompt(0, [], ""), 0, tail, np.zeros(sum(lengths), np.int32), "stop", None, episode)
        self._report.finished.append((key, rollout))
        self._news()

    def _ask(self, key: str) -> None:
        request = TurnRequest(list(self._contexts[key]), self._args.tokens, self._turns[key])
        self._report.turns.append((key, request))
        self._turns[key] += 1
        self._news()

    def _news(self) -> None:
        if self._collecting is not None:
            self._tell(self._collecting)

    def _tell(self, ref: Ref) -> None:
        if ref is self._collecting:
            self._collecting = None
            self.reply(ref, self._report, LATENCY_S)
            self._report = EpisodeReport()


def bench(workers: int, args: argparse.Namespace) -> Row:
    """One step of a pool of ``workers``, all of its episodes."""
    environment = f"{{path: guess, max_context_tokens: 4096, num_workers: {args.environments}}}"
    config = load_config(
        ROOT / "conf" / "guess_smollm2.yaml",
        [
            *("placement.mode=separate", f"rollout.num_workers={workers}", f"environment={environment}"),
            *("learner.micro_batch_tokens=4096", "rollout.max_num_seqs=256", "timeouts.generate_s=100000"),
        ],
    )
    meter = Meter()
    simulation = Simulation(meter, LATENCY_S)
    with simulation, measured(meter, simulation, None):
        factory: Any = Factory(simulation, random.Random(0), args.tokens)
        control: Any = Control()
        pool = RolloutPool(config, factory, control, shares_gpus=False, note=print)
        weights = {"weight_layout": layout(), "host_rendezvous": LearnerStore().open, "join_weights": {}}
        learner = group("learner", [Actor(simulation, **weights, send_weights=list(range(BUCKETS)))])
        actors = [EnvironmentWorker(simulation, args) for _ in range(args.environments)]
        crew = Crew(config, group("environment", actors), lambda rank: actors[rank], print)
        pool.launch()
        pool.await_started()
        pool.connect(make_transport(learner, "broadcast"), crew)
        pool.publish(0)
        meter.take()
        started_s = simulation.now_s()
        with meter.part("hand_out"):
            ids = set(pool.submit(Prompts(args.tokens).take(args.episodes // GROUP), group_size=GROUP))
            while ids:
                ids -= pool.next_groups(ids).keys()
        spent = meter.take()
        step_s = simulation.now_s() - started_s
        pool.close()
    driver_s = sum(seconds for part, seconds in spent.items() if part != "simulation")
    turns = args.episodes * args.turns
    return {
        "workers": workers,
        "environments": args.environments,
        "turns": turns,
        "driver_s": driver_s,
        "turns_per_s": turns / driver_s,
        "step_s": step_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--environments", type=int, default=8, help="environment workers")
    parser.add_argument("--episodes", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--tokens", type=int, default=64, help="of a prompt, of a reply, and observed between two replies"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.tiny:
        vars(args).update(workers=[2], environments=2, episodes=32, turns=2, tokens=8)
    rows = [bench(workers, args) for workers in args.workers]
    show("turns: CPU seconds of the driver", rows)
    write_json(args.out, rows, tokens=args.tokens, turns=args.turns, episodes=args.episodes)


if __name__ == "__main__":
    main()
