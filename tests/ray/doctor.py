"""Examines a simulated cluster of two nodes as `rlhf doctor` does; prints what it found as JSON.

A program of its own, because one process can be connected to one Ray cluster only. Usage: doctor.py RUN_DIR
"""

import json
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster as Nodes

from jobs.doctor.examination import examine
from jobs.doctor.sites import joined


def pause(seconds: float) -> None:
    time.sleep(seconds)


def main(run_dir: str) -> None:
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    nodes = Nodes(initialize_head=True, head_node_args=small)
    nodes.add_node(**small)
    with joined(nodes.address) as cluster:
        report = examine(cluster, Path(run_dir), modules=())
        late, early = cluster.nodes
        answers, failed = cluster.call(pause, {late: (60,), early: (0,)}, 3.0)
    found = {
        "nodes": list(report.nodes),
        "collectives": list(report.collectives),
        "fails": [f"{finding.where}: {finding.what}" for finding in report.findings if finding.level == "fails"],
        "ports": [facts.open_ports for facts in report.nodes.values()],
        "answered": [node == early for node in answers],
        "late": [(node == late, why) for node, why in failed.items()],
    }
    print(json.dumps(found))
    nodes.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
