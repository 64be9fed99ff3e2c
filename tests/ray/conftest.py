"""One Ray for the whole session: actors cost seconds each to start, so tests share what they can."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf

from actors.cluster import Cluster
from rlhf.config import Config
from rlhf.recipes import load_config
from rlhf.roles import Roles

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray with logical CPUs to spare and four pretended GPUs, so that GPU placement can be looked at."""
    ray.init(
        address="local",  # whatever else runs on this machine, or an interrupted session has left behind
        num_cpus=24,
        num_gpus=4,
        include_dashboard=False,
        object_store_memory=512 << 20,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_config(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """Builds a configuration from conf/grpo_tiny.yaml for the session's tiny model: ``tiny_config('num_steps=3')``."""

    def build(*overrides: str, recipe: str = "grpo_tiny") -> Config:
        run_dir = tmp_path_factory.mktemp("run")
        fixed = [
            f"model.path={tiny_model_dir}",
            f"run_dir={run_dir}",
            f"name={run_dir.name}",  # runs of one cluster have different names
            "placement.device=cpu",
            "tracking.progress=false",
        ]
        return load_config(ROOT / "conf" / f"{recipe}.yaml", [*fixed, *overrides])

    return build


@pytest.fixture(scope="session")
def live(ray_session: None, tiny_config) -> Iterator[tuple[Config, Cluster, Roles]]:
    """A whole cluster of tiny actors: two ZeRO-3 ranks, reference, rewards, two rollout workers; logprobs on."""
    config = tiny_config("rollout.num_workers=2", "rollout.logprobs=true")
    with Cluster(config) as cluster:
        yield config, cluster, cluster.roles()


def with_overrides(config: Config, *overrides: str) -> Config:
    """A copy of a configuration with some keys changed."""
    merged = OmegaConf.merge(OmegaConf.structured(config), OmegaConf.from_dotlist(list(overrides)))
    built = OmegaConf.to_object(merged)
    assert isinstance(built, Config)
    return built
