"""The update is the same whatever the micro-batch budget and the number of ranks, and survives a save and load."""

from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file

from actors.group import ActorGroup, Deadline
from actors.learner import CriticActor, LearnerActor
from actors.proxies import LearnerGroup
from rlhf.batch import TrainBatch
from rlhf.config import Config
from rlhf.errors import ConfigError
from rlhf.packing import worth_sharing

pytestmark = pytest.mark.ray

DEADLINE = Deadline(120, "timeouts.start_s")
CPU_ENV = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def start_learner(config: Config) -> tuple[ActorGroup, LearnerGroup]:
    count = config.learner.num_ranks
    remote = ray.remote(LearnerActor).options(num_cpus=1, runtime_env={"env_vars": CPU_ENV})
    handles = [remote.remote(config, rank, count) for rank in range(count)]
    group = ActorGroup.locate("learner", handles, DEADLINE).result()
    port = ray.get(handles[0].free_port.remote(), timeout=60)
    group.call("start", group.members[0].node, port, deadline=DEADLINE, doing="starting").result()
    return group, LearnerGroup(group, config.timeouts)


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
    config: Config, directory: Path, steps: int = 2, arrange: Callable[[TrainBatch], TrainBatch] = lambda batch: batch
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    group, learner = start_learner(config)
    for step in range(steps):
        metrics = learner.update(arrange(ragged_batch(step)), step).result()
    weights = weights_of(learner, directory)
    group.kill()
    return weights, metrics


# eps this large keeps Adam from magnifying the rounding of near-zero gradients into whole steps
EXACT = ("learner.optimizer.eps=1e-3", "learner.optimizer.learning_rate=1e-2", "algorithm.beta=0.05")


def groups_apart(batch: TrainBatch) -> TrainBatch:
    """The same sequences, but nobody next to one with the same prompt: each computes its own."""
    assert worth_sharing(batch)
    apart = batch.select([*range(0, batch.num_sequences, 2), *range(1, batch.num_sequences, 2)])
    assert not worth_sharing(apart)
    return apart


@pytest.fixture(scope="module")
def one_rank_one_batch(ray_session, tiny_config, tmp_path_factory):
    config = tiny_config("learner.num_ranks=1", "learner.micro_batch_tokens=4096", *EXACT)
    return updated(config, tmp_path_factory.mktemp("base"), arrange=groups_apart)


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
            "learner.gradient_checkpointing=true",
        ),
    ],
    ids=["small budget", "two ranks", "two ranks zero-2", "one rank without zero"],
)
def test_update_depends_neither_on_budget_nor_ranks_nor_shared_prompts(
    one_rank_one_batch, tiny_config, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    expected, expected_metrics = one_rank_one_batch
    actual, metrics = updated(tiny_config(*overrides, *EXACT), tmp_path)
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


def test_nor_does_it_with_every_option_on(ray_session, tiny_config, tmp_path: Path) -> None:
    one = updated(tiny_config("learner.num_ranks=1", *EXACT, *EVERY_OPTION), tmp_path / "one")
    two = updated(
        tiny_config("learner.num_ranks=2", "learner.micro_batch_tokens=128", *EXACT, *EVERY_OPTION), tmp_path / "two"
    )
    assert two[1]["grad_norm"] == pytest.approx(one[1]["grad_norm"], rel=1e-4)
    for name, tensor in one[0].items():
        torch.testing.assert_close(two[0][name], tensor, rtol=0, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_minibatches_use_the_log_probabilities_from_before_the_update(ray_session, tiny_config, tmp_path: Path) -> None:
    config = tiny_config("learner.num_ranks=1", "algorithm.num_minibatches=4", "algorithm.prompts_per_step=8", *EXACT)
    group, learner = start_learner(config)
    batch = ragged_batch(num_sequences=8)
    metrics = learner.update(batch, 0).result()
    assert metrics["approx_kl"] > 0, "later mini-batches are off-policy and must be measured against the old policy"
    group.kill()


def test_save_and_load_go_on_bit_for_bit(ray_session, tiny_config, tmp_path: Path) -> None:
    config = tiny_config("learner.num_ranks=2", "learner.optimizer.schedule=linear", "learner.optimizer.warmup_steps=3")
    group, learner = start_learner(config)
    learner.update(ragged_batch(0), 0).result()
    learner.save(str(tmp_path / "checkpoint"))
    straight = learner.update(ragged_batch(1), 1).result()
    expected = weights_of(learner, tmp_path / "straight")
    group.kill()

    group, learner = start_learner(config)
    learner.load(str(tmp_path / "checkpoint"))
    resumed = learner.update(ragged_batch(1), 1).result()
    actual = weights_of(learner, tmp_path / "resumed")
    group.kill()
    assert resumed == straight
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_saved_model_loads_with_transformers(one_rank_one_batch, tmp_path: Path, ray_session, tiny_config) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config("learner.num_ranks=2")
    group, learner = start_learner(config)
    batch = ragged_batch(3, num_sequences=1)
    expected = learner.score(batch).result()
    learner.save_model(str(tmp_path / "model"))
    group.kill()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        logits = model(batch.tokens[None]).logits[0].log_softmax(-1)
    start = int(batch.prompt_lengths[0])
    actual = logits[start - 1 : -1].gather(-1, batch.tokens[start:, None])[:, 0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def start_on_pretended_gpu(config: Config, num_bytes: int) -> tuple[ActorGroup, list[str | None]]:
    """Starts ranks that believe in a GPU of that size; returns them with what each says about its memory."""
    count = config.learner.num_ranks
    remote = ray.remote(OnPretendedGpu).options(num_cpus=1, runtime_env={"env_vars": CPU_ENV})
    handles = [remote.remote(config, rank, count) for rank in range(count)]
    group = ActorGroup.locate("learner", handles, DEADLINE).result()
    group.call("pretend", num_bytes, deadline=DEADLINE, doing="pretending").result()
    try:
        lines = group.call("check_memory", deadline=DEADLINE, doing="planning memory").result()
        port = ray.get(handles[0].free_port.remote(), timeout=60)
        group.call("start", group.members[0].node, port, deadline=DEADLINE, doing="starting").result()
    except BaseException:
        group.kill()
        raise
    return group, lines


class OnPretendedGpu(LearnerActor):
    def pretend(self, num_bytes: int) -> None:
        import actors.learner

        actors.learner.device_bytes = lambda device: num_bytes + self._rank  # the smallest decides

    def decided(self) -> tuple[bool | None, bool | None, bool | None]:
        settings = self._decided
        return settings.gradient_checkpointing, settings.offload_when_idle, settings.float32_gradients


def test_memory_decides_alike_on_all_ranks(ray_session, tiny_config) -> None:
    group, lines = start_on_pretended_gpu(tiny_config("learner.num_ranks=2"), 16 << 30)
    decided = group.call("decided", deadline=DEADLINE, doing="telling").result()
    group.kill()
    assert decided == [(False, False, True)] * 2
    assert all(line is not None and "gradient checkpointing off" in line for line in lines)


def test_what_does_not_fit_is_refused_before_it_loads(ray_session, tiny_config) -> None:
    with pytest.raises(ConfigError, match=r"^learner: .* GiB predicted to train, the GPU has 1\.0; raise learner"):
        start_on_pretended_gpu(tiny_config("learner.num_ranks=2"), 1 << 30)


def test_the_schedule_counts_the_steps_that_a_model_takes(tiny_config) -> None:
    """Ten training steps, four of them warm-up, of two mini-batches."""
    minibatches = ("num_steps=10", "algorithm.num_minibatches=2", "algorithm.num_epochs=1")
    config = tiny_config(*minibatches, "critic.warmup_steps=4", recipe="ppo_tiny")
    assert LearnerActor(config, 0, 1)._total_steps() == 12
    assert CriticActor(config, 0, 1)._total_steps() == 20
    assert LearnerActor(tiny_config(*minibatches, "critic.warmup_steps=4"), 0, 1)._total_steps() == 20, "no critic"
