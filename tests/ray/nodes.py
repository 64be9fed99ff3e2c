"""Trains on a simulated cluster of three nodes, loses one in the middle, gains another; prints what happened as JSON.

A program of its own, because one process can be connected to one Ray cluster only. Usage: nodes.py MODEL_DIR RUN_DIR
"""

import json
import sys
import threading
from pathlib import Path

import ray
from ray.cluster_utils import Cluster as Nodes

from rlhf.recipes import load_config
from tests.ray.chaos import recorded_run, until

ROOT = Path(__file__).resolve().parents[2]


def main(model: str, run_dir: str) -> None:
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": 256 << 20})
    extra = [nodes.add_node(num_cpus=1, object_store_memory=80 << 20, resources={"rollout": 1}) for _ in range(2)]
    ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
    overrides = [
        *(f"model.path={model}", f"run_dir={run_dir}", "num_steps=100000", "placement.device=cpu"),
        *("learner.num_ranks=1", "algorithm.beta=0", "tracking.progress=false", "rollout.max_staleness=1"),
        # one worker wherever there is room, and one on each node that is there for rollouts
        *("rollout.num_workers=1", "rollout.extra_kinds.remote.num_workers=2"),
        "rollout.extra_kinds.remote.resources={rollout: 1}",
    ]
    notes: list[str] = []
    history: list[str] = []
    config = load_config(ROOT / "conf" / "grpo_tiny.yaml", overrides)
    with recorded_run(config, notes) as run:

        def live() -> int:
            return int(run.metrics[-1]["pool/live_workers"]) if run.metrics else 0

        training = threading.Thread(target=run.driver.run, daemon=True)
        training.start()
        try:  # Ray adds nodes from the main thread only
            until(lambda: live() == 3, 120, "three workers at work")
            history.append("3 live")
            nodes.remove_node(extra[0], allow_graceful=False)
            until(lambda: live() == 2, 120, "the lost worker being noticed")
            steps = run.driver.step
            until(lambda: run.driver.step >= steps + 3, 120, "steps without it")
            history.append("2 live after a node left")
            nodes.add_node(num_cpus=1, object_store_memory=80 << 20, resources={"rollout": 1})
            until(lambda: live() == 3, 200, "a worker on the new node")
            history.append("3 live after a node came")
        finally:
            run.driver.stop_requested = True
            training.join(timeout=60)
        pending = run.driver.stream.state_dict()["pending"]
        taken = run.driver.stream.state_dict()["prompts"]["position"]
        once = sorted([*run.prompts, *pending]) == list(range(taken))
    print(json.dumps({"history": history, "notes": notes, "each_prompt_once": once}))
    ray.shutdown()
    nodes.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
