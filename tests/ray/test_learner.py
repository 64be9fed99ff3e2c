"""The update is the same whatever the micro-batch budget and the number of ranks, and survives a save and load."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.learner import CriticActor, LearnerActor
from actors.proxies import LearnerGroup
from rlhf.batch import TrainBatch
from rlhf.config import Config
from rlhf.errors import ConfigError
from rlhf.packing import worth_sharing
from tests.ray.warm import DEADLINE, WarmRanks

pytestmark = pytest.mark.ray

Start = Callable[[Config], LearnerGroup]


@pytest.fixture(scope="module")
def start_learner(ray_session: None, tiny_config) -> Iterator[Start]:
    """Starts a learner in warm processes; the last one of as many ranks is then gone."""
    warm: dict[int, WarmRanks] = {}

    def start(config: Config) -> LearnerGroup:
        num_ranks = config.learner.num_ranks
        if num_ranks not in warm:
            warm[num_ranks] = WarmRanks(LearnerActor, config, num_ranks)
        return warm[num_ranks].start(config)

    yield start
    for ranks in warm.values():
        ranks.close()


def ragged_batch(seed: int = 0, num_sequences: int = 12) -> TrainBatch:
    """Groups of two completions of one prompt."""
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = torch.randint(3, 20, (-(-num_sequences // 2),), generator=generator).repeat_interleave(2)
    prompt_lengths = prompt_lengths[:num_sequences]
    completion_lengths = torch.randint(1, 30, (num_sequences,), generator=generator)
    num_tokens = int(completion_lengths.sum())
    tokens = torch.randint(3, 500, (int((prompt_lengths + completion_lengths).sum()),), generator=generator)
    starts = torch.cumsum(prompt_lengths + completion_lengths, 0) - (prompt_lengths + completion_lengths)
    for first, second, length in zip(starts[::2], starts[1::2], prompt_lengths[1::2], strict=False):
        tokens[second : second + length] = tokens[first : first + length]
    return TrainBatch(
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        completion_lengths=completion_lengths,
        truncated=torch.arange(num_sequences) % 4 == 0,
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        advantages=torch.randn(num_tokens, generator=generator),
        ref_logprobs=-4 + 0.1 * torch.randn(num_tokens, generator=generator),
        rollout_logprobs=-6 + 0.1 * torch.randn(num_tokens, generator=generator),
    )


def weights_of(learner: LearnerGroup, directory: Path) -> dict[str, torch.Tensor]:
    learner.save_model(str(directory))
    return load_file(directory / "model.safetensors")


def updated(
    learner: LearnerGroup, directory: Path, arrange: Callable[[TrainBatch], TrainBatch] = lambda batch: batch
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights and metrics after two steps."""
    for step in range(2):
        metrics = learner.update(arrange(ragged_batch(step)), step).result()
    return weights_of(learner, directory), metrics


# eps this large keeps Adam from magnifying the rounding of near-zero gradients into whole steps
EXACT = ("learner.optimizer.eps=1e-3", "learner.optimizer.learning_rate=1e-2", "algorithm.beta=0.05")


def groups_apart(batch: TrainBatch) -> TrainBatch:
    """The same sequences, but nobody next to one with the same prompt: each computes its own."""
    assert worth_sharing(batch)
    apart = batch.select([*range(0, batch.num_sequences, 2), *range(1, batch.num_sequences, 2)])
    assert not worth_sharing(apart)
    return apart


@pytest.fixture(scope="module")
def one_rank_one_batch(start_learner: Start, tiny_config, tmp_path_factory):
    config = tiny_config("learner.num_ranks=1", "learner.micro_batch_tokens=4096", *EXACT)
    return updated(start_learner(config), tmp_path_factory.mktemp("base"), arrange=groups_apart)


@pytest.mark.parametrize(
    "overrides",
    [
        ("learner.num_ranks=1", "learner.micro_batch_tokens=96"),
        ("learner.num_ranks=2", "learner.micro_batch_tokens=128"),
        ("learner.num_ranks=2", "learner.micro_batch_tokens=4096", "learner.zero_stage=2"),
        (
            "learner.num_ranks=1",
            "learner.micro_batch_tokens=512",
            "learner.zero_stage=0",
            "learner.checkpointed_layers=1",
        ),
    ],
    ids=["small budget", "two ranks", "two ranks zero-2", "one rank without zero"],
)
def test_update_depends_neither_on_budget_nor_ranks_nor_shared_prompts(
    one_rank_one_batch, start_learner: Start, tiny_config, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    expected, expected_metrics = one_rank_one_batch
    actual, metrics = updated(start_learner(tiny_config(*overrides, *EXACT)), tmp_path)
    assert actual.keys() == expected.keys()
    assert metrics["grad_norm"] == pytest.approx(expected_metrics["grad_norm"], rel=1e-4)
    assert metrics["kl"] == pytest.approx(expected_metrics["kl"], rel=1e-4)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


EVERY_OPTION = (
    *("algorithm.top_entropy_quantile=0.5", "algorithm.mask_truncated_completions=true", "algorithm.entropy_coef=0.01"),
    *("algorithm.rollout_correction=sequence_truncate", "algorithm.importance_sampling_level=sequence"),
    *("algorithm.delta=4", "algorithm.num_minibatches=2", "rollout.ignore_eos=false"),
)


def test_nor_does_it_with_every_option_on(start_learner: Start, tiny_config, tmp_path: Path) -> None:
    options = (*EXACT, *EVERY_OPTION)
    one = updated(start_learner(tiny_config("learner.num_ranks=1", *options)), tmp_path / "one")
    config = tiny_config("learner.num_ranks=2", "learner.micro_batch_tokens=128", *options)
    two = updated(start_learner(config), tmp_path / "two")
    assert two[1]["grad_norm"] == pytest.approx(one[1]["grad_norm"], rel=1e-4)
    for name, tensor in one[0].items():
        torch.testing.assert_close(two[0][name], tensor, rtol=0, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_save_and_load_go_on_bit_for_bit(start_learner: Start, tiny_config, tmp_path: Path) -> None:
    config = tiny_config("learner.num_ranks=2", "learner.optimizer.schedule=linear", "learner.optimizer.warmup_steps=3")
    learner = start_learner(config)
    learner.update(ragged_batch(0), 0).result()
    learner.save(str(tmp_path / "checkpoint"))
    straight = learner.update(ragged_batch(1), 1).result()
    expected = weights_of(learner, tmp_path / "straight")
    written = learner.finish_save(wait=True).result()
    files = (tmp_path / "checkpoint").rglob("*states.pt")
    assert written is not None and written.num_bytes == sum(path.stat().st_size for path in files)

    elsewhere = WarmRanks(LearnerActor, config, 2)
    learner = elsewhere.start(config)
    learner.load(str(tmp_path / "checkpoint"))
    resumed = learner.update(ragged_batch(1), 1).result()
    actual = weights_of(learner, tmp_path / "resumed")
    elsewhere.close()
    assert resumed == straight
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_saved_model_loads_with_transformers(start_learner: Start, tiny_config, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    learner = start_learner(tiny_config("learner.num_ranks=2"))
    batch = ragged_batch(3, num_sequences=1)
    expected = learner.score(batch).result()
    learner.save_model(str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        logits = model(batch.tokens[None]).logits[0].log_softmax(-1)
    start = int(batch.prompt_lengths[0])
    actual = logits[start - 1 : -1].gather(-1, batch.tokens[start:, None])[:, 0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


class OnPretendedGpu(LearnerActor):
    """Believes in a GPU of another size."""

    def pretend(self, num_bytes: int) -> None:
        import actors.learner

        actors.learner.device_bytes = lambda device: num_bytes + self._rank  # the smallest decides

    def decided(self) -> tuple[int | None, bool | None, bool | None]:
        settings = self._decided
        return settings.checkpointed_layers, settings.offload_when_idle, settings.float32_gradients


def test_memory_decides_alike_on_all_ranks_and_refuses_what_does_not_fit(ray_session, tiny_config) -> None:
    config = tiny_config("learner.num_ranks=2")
    ranks = WarmRanks(OnPretendedGpu, config, 2)

    def ask(method: str, *args: Any) -> list[Any]:
        return ranks.group.call(method, *args, deadline=DEADLINE, doing="deciding").result()

    ask("pretend", 1 << 30)
    with pytest.raises(ConfigError, match=r"^learner: .* GiB predicted to train, the GPU has 1\.0; raise learner"):
        ask("check_memory")  # before anything loads
    ask("pretend", 16 << 30)
    lines = ask("check_memory")
    assert all(line is not None and "gradient checkpointing in 0 of 2 layers" in line for line in lines)
    ranks.start(config)
    assert ask("decided") == [(0, False, True)] * 2
    ranks.close()


def test_the_schedule_counts_the_steps_that_a_model_takes(tiny_config) -> None:
    """Ten training steps, four of them warm-up, of two mini-batches."""
    minibatches = ("num_steps=10", "algorithm.num_minibatches=2", "algorithm.num_epochs=1")
    config = tiny_config(*minibatches, "critic.warmup_steps=4", recipe="ppo_tiny")
    assert LearnerActor(config, 0, 1)._total_steps() == 12
    assert CriticActor(config, 0, 1)._total_steps() == 20
    assert LearnerActor(tiny_config(*minibatches, "critic.warmup_steps=4"), 0, 1)._total_steps() == 20, "no critic"
