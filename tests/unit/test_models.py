"""A packed forward is exactly one sequence at a time: log-probabilities, entropy, and every gradient."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from jobs.prepare import prepare_tiny
from rlhf.batch import TrainBatch
from rlhf.errors import ConfigError
from rlhf.models.families import LogitShape
from rlhf.models.heads import ScalarHead
from rlhf.models.inputs import packed_inputs
from rlhf.models.loading import load_policy, load_scalar
from rlhf.models.packed import PolicyModel

TEMPERATURE = 0.7
CPU = torch.device("cpu")


def ragged(prompts: list[list[int]], completions: list[int]) -> TrainBatch:
    """Sequences of these prompts, with completions of random tokens."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, 500, (length,), generator=generator).tolist() for length in completions]
    return TrainBatch(
        tokens=torch.tensor([t for prompt, tail in zip(prompts, drawn, strict=True) for t in (*prompt, *tail)]),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        completion_lengths=torch.tensor(completions),
        truncated=torch.zeros(len(prompts), dtype=torch.bool),
        versions=torch.zeros(sum(completions), dtype=torch.int32),
    )


def random_prompt(length: int) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.fixture
def batch() -> TrainBatch:
    return ragged([random_prompt(n) for n in (5, 1, 9, 2)], [7, 2, 11, 1])


@pytest.fixture
def groups() -> TrainBatch:
    """Three completions of one prompt, one of another, two of a third."""
    return ragged([random_prompt(n) for n in (5, 5, 5, 9, 1, 1)], [7, 1, 4, 6, 2, 1])


def one_at_a_time(model: torch.nn.Module, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropy of the completion tokens from whole logits, a sequence per forward."""
    logprobs, entropies, start = [], [], 0
    for prompt, completion in zip(batch.prompt_lengths.tolist(), batch.completion_lengths.tolist(), strict=True):
        ids = batch.tokens[start : start + prompt + completion]
        start += prompt + completion
        log_p = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        logprobs.append(log_p.gather(-1, ids[prompt:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("checkpointed", [0, 1, 2], ids="{} checkpointed".format)
@pytest.mark.parametrize("chunk_tokens", [4, 1024])
@pytest.mark.parametrize(("sequences", "share_prompts"), [("batch", False), ("groups", False), ("groups", True)])
def test_packed_equals_one_sequence_at_a_time(
    tiny_model_dir: Path,
    request: pytest.FixtureRequest,
    sequences: str,
    share_prompts: bool,
    chunk_tokens: int,
    checkpointed: int,
) -> None:
    batch: TrainBatch = request.getfixturevalue(sequences)
    policy = load_policy(
        str(tiny_model_dir), dtype=torch.float32, temperature=TEMPERATURE, chunk_tokens=chunk_tokens
    ).train()
    if checkpointed:
        policy.checkpoint_layers(checkpointed)
        assert [layer.gradient_checkpointing for layer in policy.layers] == [True, checkpointed == 2]
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir).train()
    logprobs, entropy = policy(packed_inputs(batch, CPU, share_prompts=share_prompts))
    expected, expected_entropy = one_at_a_time(plain, batch)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-5)

    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 21, generator=generator)
    (logprobs @ a + entropy @ b).backward()
    (expected @ a + expected_entropy @ b).backward()
    gradients = {name: p.grad for name, p in policy.lm.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-5 * scale, msg=name)


def test_packed_inputs_by_hand() -> None:
    batch = TrainBatch(
        tokens=torch.tensor([10, 11, 12, 20, 21, 22, 23]),
        prompt_lengths=torch.tensor([2, 1]),
        completion_lengths=torch.tensor([1, 3]),
        truncated=torch.zeros(2, dtype=torch.bool),
        versions=torch.zeros(4, dtype=torch.int32),
    )
    inputs = packed_inputs(batch, CPU)
    assert inputs.tokens.tolist() == batch.tokens.tolist()
    assert inputs.positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert (inputs.borders.tolist(), inputs.borders.dtype, inputs.max_length) == ([0, 3, 7], torch.int32, 4)
    assert (inputs.key_borders.tolist(), inputs.max_keys, inputs.attended) == ([0, 3, 7], 4, None)
    assert inputs.predictors.tolist() == [1, 3, 4, 5]
    assert inputs.targets.tolist() == [12, 21, 22, 23]


def test_packed_inputs_are_as_drawn() -> None:
    """The numbers in the docstring of ``packed_inputs`` are what it gives."""

    def drawn(name: str) -> list[int]:
        row = re.search(rf"^ +{re.escape(name)} +([\d |]+)", packed_inputs.__doc__ or "", re.MULTILINE)
        assert row is not None
        return [int(number) for number in re.findall(r"\d+", row[1])]

    assert drawn("batch.tokens") == [10, 11, 12, 10, 11, 13, 14]
    batch = TrainBatch(
        tokens=torch.tensor(drawn("batch.tokens")),
        prompt_lengths=torch.tensor([2, 2]),
        completion_lengths=torch.tensor([1, 2]),
        truncated=torch.zeros(2, dtype=torch.bool),
        versions=torch.zeros(3, dtype=torch.int32),
    )
    inputs = packed_inputs(batch, CPU, share_prompts=True)
    for name in ("tokens", "positions", "borders", "attended", "key_borders", "predictors", "targets"):
        assert getattr(inputs, name).tolist() == drawn(name), name
    assert inputs.tokens[torch.tensor(drawn("place"))].equal(batch.tokens)


def test_packed_inputs_with_a_shared_prompt_by_hand() -> None:
    """Two completions of prompt (10, 11), then a sequence of another prompt."""
    batch = TrainBatch(
        tokens=torch.tensor([10, 11, 12, 10, 11, 13, 14, 20, 21]),
        prompt_lengths=torch.tensor([2, 2, 1]),
        completion_lengths=torch.tensor([1, 2, 1]),
        truncated=torch.zeros(3, dtype=torch.bool),
        versions=torch.zeros(4, dtype=torch.int32),
    )
    inputs = packed_inputs(batch, CPU, share_prompts=True)
    assert inputs.tokens.tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert inputs.positions.tolist() == [0, 1, 2, 2, 3, 0, 1]
    assert (inputs.borders.tolist(), inputs.max_length) == ([0, 2, 3, 5, 7], 2)
    assert inputs.attended is not None
    assert inputs.attended.tolist() == [0, 1, *(0, 1, 2), *(0, 1, 3, 4), *(5, 6)]
    assert (inputs.key_borders.tolist(), inputs.max_keys) == ([0, 2, 5, 9, 11], 4)
    assert inputs.predictors.tolist() == [1, 1, 3, 5]
    assert inputs.targets.tolist() == [12, 13, 14, 21]
    alone = packed_inputs(batch.select([2]), CPU, share_prompts=True)
    assert alone.attended is None, "nobody shares anything"


@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(scale=0.6), LogitShape(scale=1.5, softcap=2.0)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_logprobs_gradient_is_the_numerical_one(shape: LogitShape, with_bias: bool) -> None:
    from rlhf.models.heads import _ChunkedLogprobs

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, generator=generator, requires_grad=True) if with_bias else None
    targets = torch.tensor([0, 6, 3, 3, 1])

    def total(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        logprobs, entropy = _ChunkedLogprobs.apply(h, w, b, targets, shape, 1.3, 2)
        return (logprobs * torch.arange(1.0, 6) + 0.5 * entropy).sum()

    # log-probabilities are float32 by contract: finite differences see that rounding
    assert torch.autograd.gradcheck(
        total, (hidden, weight) if bias is None else (hidden, weight, bias), eps=1e-2, atol=2e-3
    )


def test_sequences_do_not_see_each_other(tiny_model_dir: Path, batch: TrainBatch) -> None:
    policy = load_policy(str(tiny_model_dir), dtype=torch.float32, temperature=1.0, chunk_tokens=8).eval()
    with torch.no_grad():
        together, _ = policy(packed_inputs(batch, CPU))
        order = [2, 0, 3, 1]
        shuffled, _ = policy(packed_inputs(batch.select(order), CPU))
    pieces = together.split(batch.completion_lengths.tolist())
    torch.testing.assert_close(shuffled, torch.cat([pieces[i] for i in order]), rtol=0, atol=1e-5)


def test_scalar_model_reads_the_state_before_each_token(tiny_model_dir: Path, batch: TrainBatch) -> None:
    critic = load_scalar(str(tiny_model_dir), dtype=torch.float32, fresh_head="random").eval()
    with torch.no_grad():
        values = critic(packed_inputs(batch, CPU))
        single = batch.select([2])
        alone = critic(packed_inputs(single, CPU))
    assert values.shape == (21,)
    torch.testing.assert_close(values[9:20], alone, rtol=0, atol=1e-5)


def test_a_score_head_computes_in_float32() -> None:
    head = torch.nn.Linear(4096, 1, bias=True, dtype=torch.bfloat16)
    hidden = torch.randn(7, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = hidden.double() @ head.weight.double().T + head.bias.double()
    head.__class__ = ScalarHead
    assert head(hidden).dtype == torch.float32
    torch.testing.assert_close(head(hidden).double(), exact, rtol=0, atol=1e-5)


def test_an_lm_head_we_cannot_chunk_is_refused(tiny_model_dir: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    lm.lm_head = torch.nn.Sequential(lm.lm_head)
    with pytest.raises(ConfigError, match="Sequential"):
        PolicyModel(lm, temperature=1.0, chunk_tokens=8)


def save_changed(path: Path, model_dir: Path, **settings: object) -> str:
    """A copy of a model's directory whose configuration says something else."""
    lm = AutoModelForCausalLM.from_pretrained(model_dir)
    lm.config.update(settings)
    lm.save_pretrained(path)
    return str(path)


def test_dropout_is_off_in_training_and_as_it_was_in_what_is_saved(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = save_changed(tmp_path, tiny_model_dir, attention_dropout=0.5)
    policy = load_policy(path, dtype=torch.float32, temperature=1.0, chunk_tokens=8).train()
    assert policy.lm.config.attention_dropout == 0
    with policy.original_config():
        assert policy.lm.config.attention_dropout == 0.5
    assert policy.lm.config.attention_dropout == 0


def test_a_classifier_is_no_policy_and_a_language_model_no_reward_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    untied = prepare_tiny(tmp_path / "lm", tie_word_embeddings=False)
    classifier = load_scalar(str(untied), dtype=torch.float32, fresh_head="zero")
    assert not classifier.lm.score.weight.any()
    classifier.lm.save_pretrained(tmp_path / "classifier")
    with pytest.raises(ConfigError, match=r"model\.path=.*lacks lm_head\.weight"):
        load_policy(str(tmp_path / "classifier"), dtype=torch.float32, temperature=1.0, chunk_tokens=8)
    with pytest.raises(ConfigError, match=r"reward\.model\.path=.*lacks score\.weight; `rlhf train-reward`"):
        load_scalar(str(tiny_model_dir), dtype=torch.float32, key="reward.model.path")
    assert load_scalar(str(tmp_path / "classifier"), dtype=torch.float32).lm.score.weight.shape == (1, 128)


def test_a_tied_classifier_is_no_policy_either(tiny_model_dir: Path, tmp_path: Path) -> None:
    """It lacks nothing: the head of a tied language model is its embedding."""
    load_scalar(str(tiny_model_dir), dtype=torch.float32, fresh_head="random").lm.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path=.*LlamaForSequenceClassification"):
        load_policy(str(tmp_path), dtype=torch.float32, temperature=1.0, chunk_tokens=8)
