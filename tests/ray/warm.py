"""Learner processes that serve one run after the other: importing torch and DeepSpeed takes longer than most tests."""

from typing import Any

import ray

from actors.group import ActorGroup, Deadline
from actors.learner import EngineActor
from actors.proxies import LearnerGroup
from rlhf.config import Config

DEADLINE = Deadline(120, "timeouts.start_s")
CPU_ENV = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


class WarmRanks:
    """The ranks of a learner or critic, each in its process; for runs with this number of them."""

    def __init__(self, actor: type[EngineActor], config: Config, num_ranks: int) -> None:
        remote = ray.remote(actor).options(num_cpus=1, runtime_env={"env_vars": CPU_ENV})
        self.handles = [remote.remote(config, rank, num_ranks) for rank in range(num_ranks)]
        self.group = ActorGroup.locate(actor.ROLE, self.handles, DEADLINE).result()
        self._root = self.group.members[0].node, ray.get(self.handles[0].host_store.remote(), timeout=60)

    def start(self, config: Config) -> LearnerGroup:
        """A fresh learner, in place of the one before."""
        ray.get([handle.__ray_call__.remote(_become, config) for handle in self.handles], timeout=60)
        self.group.call("start", *self._root, deadline=DEADLINE, doing="starting").result()
        return LearnerGroup(self.group, config.timeouts)

    def close(self) -> None:
        self.group.kill()


def _become(actor: Any, config: Config) -> None:
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # of the run before, if that was at ZeRO-3
    actor._config = config
