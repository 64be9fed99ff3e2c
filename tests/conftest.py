"""What all tests share: a quiet environment, and one tiny model per session."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from xdist.scheduler import LoadScopeScheduling

    from tests.ranks import Ranks

QUIET_AND_OFFLINE = {  # read when torch, transformers and vLLM are imported, which nothing above does
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
for key, value in QUIET_AND_OFFLINE.items():
    os.environ.setdefault(key, value)

hypothesis.settings.register_profile("any machine", deadline=None)  # how long an example takes proves nothing
hypothesis.settings.register_profile(  # for tests/mutants/generated.py, which need not know the smallest that fails
    "few examples", deadline=None, max_examples=20, phases=[hypothesis.Phase.generate]
)
hypothesis.settings.load_profile("any machine")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadScopeScheduling":
    """`make test` has two processes: what starts Ray stays in one, where it takes turns; other files go to either."""
    from xdist.scheduler import LoadScopeScheduling

    class RayInOne(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith("tests/ray/") else nodeid.split("::")[0]

    return RayInOne(config, log)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer random Llama with tokenizer and chat template. Read it; never write into it."""
    from jobs.prepare import prepare_tiny  # here, so that tests of pure arithmetic start without torch

    return prepare_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_dir: Path) -> "PreTrainedTokenizerBase":
    """The tiny model's tokenizer: byte-level BPE, 512 tokens."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture(scope="session")
def ranks() -> "Iterator[Callable[[int], Ranks]]":
    """Warm ranks, as many as are asked for; see ``Ranks.run``."""
    from tests.ranks import Ranks

    started: dict[int, Ranks] = {}

    def warm(num_ranks: int) -> Ranks:
        if num_ranks not in started or started[num_ranks].closed:
            started[num_ranks] = Ranks(num_ranks)
        return started[num_ranks]

    yield warm
    for group in started.values():
        group.close()
