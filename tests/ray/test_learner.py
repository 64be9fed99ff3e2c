"""The update is that of plain torch, whatever the micro-batch budget and the number of ranks; saves and loads."""

import math
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

UNTRAINED = -7.0  # about the log-probability of a token: so every term of a loss has its weight
Start = Callable[[Config], LearnerGroup]
Arrange = Callable[[TrainBatch], TrainBatch]


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
        ref_logprobs=UNTRAINED + 0.3 * torch.randn(num_tokens, generator=generator),
        rollout_logprobs=UNTRAINED + 0.3 * torch.randn(num_tokens, generator=generator),
    )


def weights_of(learner: LearnerGroup, directory: Path) -> dict[str, torch.Tensor]:
    learner.save_model(str(directory))
    return load_file(directory / "model.safetensors")


def updated(
    learner: LearnerGroup, directory: Path, arrange: Arrange
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights and metrics after two steps."""
    for step in range(2):
        metrics = learner.update(arrange(ragged_batch(step)), step).result()
    return weights_of(learner, directory), metrics


# eps this large keeps Adam from magnifying the rounding of near-zero gradients into whole steps
EXACT = ("learner.optimizer.eps=1e-3", "learner.optimizer.learning_rate=1e-2", "algorithm.beta=0.05")


def as_it_is(batch: TrainBatch) -> TrainBatch:
    return batch


def groups_apart(batch: TrainBatch) -> TrainBatch:
    """The same sequences, but nobody next to one with the same prompt: each computes its own."""
    assert worth_sharing(batch)
    apart = batch.select([*range(0, batch.num_sequences, 2), *range(1, batch.num_sequences, 2)])
    assert not worth_sharing(apart)
    return apart


def by_hand(config: Config) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """What ``updated`` should give: transformers' model on one sequence after the other, and torch's own AdamW."""
    from transformers import AutoModelForCausalLM

    algorithm, optim = config.algorithm, config.learner.optimizer
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    adam = torch.optim.AdamW(model.parameters(), optim.learning_rate, optim.betas, optim.eps, optim.weight_decay)

    def forward(sequence: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the completion's tokens, and entropies."""
        start = int(sequence.prompt_lengths)
        logits = model(sequence.tokens[None]).logits[0, start - 1 : -1].log_softmax(-1)
        return logits.gather(-1, sequence.tokens[start:, None])[:, 0], -(logits.exp() * logits).sum(-1)

    for step in range(2):
        batch = ragged_batch(step)
        sequences = [batch.select([i]) for i in range(batch.num_sequences)]
        with torch.no_grad():
            before = [forward(sequence) for sequence in sequences]
        counts = [not (algorithm.mask_truncated_completions and bool(s.truncated)) for s in sequences]
        entropies = torch.cat([entropy for (_, entropy), counted in zip(before, counts, strict=True) if counted])
        least = entropies.quantile(1 - algorithm.top_entropy_quantile, interpolation="higher")
        order = list(range(batch.num_sequences))
        if algorithm.num_minibatches > 1:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(step)).tolist()
        size = len(order) // algorithm.num_minibatches
        norms, kls = [], []
        for first in range(0, len(order), size):
            mine = [i for i in order[first : first + size] if counts[i]]
            losses, kl_sum = [], 0.0
            for i in mine:
                (logprobs, entropy), (old, old_entropy), sequence = forward(sequences[i]), before[i], sequences[i]
                log_ratio = logprobs - old
                if algorithm.importance_sampling_level == "sequence":
                    log_ratio = log_ratio.mean().expand_as(log_ratio)
                ratio = log_ratio.exp()
                clipped = ratio.clamp(1 - algorithm.epsilon_low, 1 + algorithm.epsilon_high)
                advantages = sequence.advantages
                loss = -torch.minimum(ratio.clamp(max=algorithm.delta or math.inf) * advantages, clipped * advantages)
                if algorithm.rollout_correction == "sequence_truncate":
                    sampled = (old - sequence.rollout_logprobs).sum().exp()
                    loss = loss * sampled.clamp(max=algorithm.rollout_correction_cap)
                gap = sequence.ref_logprobs - logprobs
                kl = ratio * (gap.exp() - 1 - gap)
                losses.append(loss * (old_entropy >= least) + algorithm.beta * kl - algorithm.entropy_coef * entropy)
                kl_sum += kl.sum().item()
            adam.zero_grad()
            whole = torch.cat(losses)
            whole.mean().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)))
            kls.append(kl_sum / len(whole))
            adam.step()
    metrics = {"grad_norm": sum(norms) / len(norms), "kl": sum(kls) / len(kls)}
    return {name: tensor.detach() for name, tensor in model.named_parameters()}, metrics


EVERY_OPTION = (
    *("algorithm.top_entropy_quantile=0.5", "algorithm.mask_truncated_completions=true", "algorithm.entropy_coef=0.01"),
    *("algorithm.rollout_correction=sequence_truncate", "algorithm.importance_sampling_level=sequence"),
    *("algorithm.delta=4", "algorithm.num_minibatches=2", "rollout.ignore_eos=false"),
)


@pytest.mark.parametrize(
    ("arrange", "overrides"),
    [
        (groups_apart, ("learner.num_ranks=1", "learner.micro_batch_tokens=4096")),
        (as_it_is, ("learner.num_ranks=1", "learner.micro_batch_tokens=96")),
        (as_it_is, ("learner.num_ranks=2", "learner.micro_batch_tokens=128")),
        (as_it_is, ("learner.num_ranks=2", "learner.micro_batch_tokens=4096", "learner.zero_stage=2")),
        (
            as_it_is,
            (
                *("learner.num_ranks=1", "learner.micro_batch_tokens=512", "learner.zero_stage=0"),
                "learner.checkpointed_layers=1",
            ),
        ),
        (as_it_is, ("learner.num_ranks=2", "learner.micro_batch_tokens=128", *EVERY_OPTION)),
        pytest.param(
            as_it_is,
            ("learner.num_ranks=2", "learner.zero_stage=1", "learner.offload=optimizer"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            as_it_is,
            ("learner.num_ranks=2", "learner.micro_batch_tokens=128", "learner.offload=all"),
            marks=pytest.mark.long,
        ),
    ],
    ids=[
        *(
            "no shared prompts",
            "small budget",
            "two ranks",
            "two ranks zero-2",
            "one rank without zero",
            "every option",
        ),
        *("optimizer on the host", "weights on the host"),
    ],
)
def test_an_update_is_the_same_however_it_is_spread_and_the_one_by_hand(
    start_learner: Start, tiny_config, tmp_path: Path, arrange: Arrange, overrides: tuple[str, ...]
) -> None:
    config = tiny_config(*overrides, *EXACT)
    expected, expected_metrics = by_hand(config)
    actual, metrics = updated(start_learner(config), tmp_path, arrange)
    assert actual.keys() == expected.keys()
    assert {name: metrics[name] for name in expected_metrics} == pytest.approx(expected_metrics, rel=1e-4)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


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

    def decided(self) -> tuple[int | None, int | None, str | None, bool | None]:
        settings = self._decided
        return (
            settings.zero_stage,
            settings.checkpointed_layers,
            settings.offload,
            settings.float32_gradients,
        )


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
    for predicted in ask("predicted_gib"):
        assert predicted.keys() == {"learner", "reference", "rollout"}
        assert f"learner: {predicted['learner']:.1f} GiB of 16.0 predicted" in lines[0]
    ranks.start(config)
    assert ask("decided") == [(1, 0, "none", True)] * 2
    ranks.close()


def test_the_schedule_counts_the_steps_that_a_model_takes(tiny_config) -> None:
    """Ten training steps, four of them warm-up, of two mini-batches."""
    minibatches = ("num_steps=10", "algorithm.num_minibatches=2", "algorithm.num_epochs=1")
    config = tiny_config(*minibatches, "critic.warmup_steps=4", recipe="ppo_tiny")
    assert LearnerActor(config, 0, 1)._total_steps() == 12
    assert CriticActor(config, 0, 1)._total_steps() == 20
    assert LearnerActor(tiny_config(*minibatches, "critic.warmup_steps=4"), 0, 1)._total_steps() == 20, "no critic"
