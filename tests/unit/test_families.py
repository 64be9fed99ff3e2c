"""Supported families are right when packed, prompts shared or not, to the last gradient; all others are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.batch import TrainBatch
from rlhf.errors import ConfigError
from rlhf.models import attention
from rlhf.models.inputs import packed_inputs
from rlhf.models.loading import load_policy
from rlhf.models.probe import check_packing
from tests.families import FAMILIES, REFUSED, make_model, small_config

CPU = torch.device("cpu")
PROMPTS, COMPLETIONS = (11, 11, 11, 5), (9, 14, 3, 17)  # all longer than a window


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(3, 500, (count,), generator=generator)

    shared = draw(PROMPTS[0])
    prompts = [shared, shared, shared, draw(PROMPTS[3])]
    return TrainBatch(
        tokens=torch.cat([part for prompt, n in zip(prompts, COMPLETIONS, strict=True) for part in (prompt, draw(n))]),
        prompt_lengths=torch.tensor(PROMPTS),
        completion_lengths=torch.tensor(COMPLETIONS),
        truncated=torch.zeros(4, dtype=torch.bool),
        versions=torch.zeros(sum(COMPLETIONS), dtype=torch.int32),
    )


def eager_logprobs(model: Any, batch: TrainBatch) -> torch.Tensor:
    """transformers' own: one sequence per forward, eager attention, whole logits."""
    logprobs = []
    for sequence in (batch.select([i]) for i in range(batch.num_sequences)):
        prompt = int(sequence.prompt_lengths)
        log_p = model(input_ids=sequence.tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
        logprobs.append(log_p[prompt - 1 : -1].gather(-1, sequence.tokens[prompt:, None])[:, 0])
    return torch.cat(logprobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_and_shared_prompts_equal_transformers_eager_attention(
    family: str, batch: TrainBatch, tmp_path: Path
) -> None:
    path = str(make_model(tmp_path, small_config(*FAMILIES[family])))
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    # long factors of rotary frequencies for short sequences too, as vLLM has them for a run of such lengths
    max_tokens = 32 if family == "phi3-longrope" else 256
    expected = eager_logprobs(plain.eval(), batch)
    weights = torch.randn(sum(COMPLETIONS), generator=torch.Generator().manual_seed(1))
    (expected @ weights).backward()
    policy = load_policy(path, dtype=torch.float32, temperature=1.0, chunk_tokens=16, max_tokens=max_tokens).eval()
    for share_prompts in (False, True):
        policy.zero_grad()
        logprobs, _ = policy(packed_inputs(batch, CPU, share_prompts=share_prompts))
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)
        (logprobs @ weights).backward()
        gradients = [
            (name, p.grad, q.grad)
            for (name, p), q in zip(policy.lm.named_parameters(), plain.parameters(), strict=True)
        ]
        largest = max(theirs.abs().max().item() for _, _, theirs in gradients if theirs is not None)
        for name, ours, theirs in gradients:
            if theirs is None:
                assert ours is None or not ours.any(), name
                continue
            bound = 1e-4 * max(theirs.abs().max().item(), 0.01 * largest)  # some are zero but for rounding
            torch.testing.assert_close(ours, theirs, rtol=0, atol=bound, msg=name)
    check_packing(policy, policy, CPU, key="model.path")
    rounded = load_policy(path, dtype=torch.bfloat16, temperature=1.0, chunk_tokens=16).eval()
    check_packing(rounded, rounded, CPU, key="model.path")


def test_a_window_that_is_left_out_shows_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would on a GPU: what rounding explains must not hide it."""
    path = str(make_model(tmp_path, small_config(*FAMILIES["mistral"])))
    policy = load_policy(path, dtype=torch.bfloat16, temperature=1.0, chunk_tokens=16).eval()
    plain = attention._plain
    monkeypatch.setattr(attention, "_plain", lambda *span, scale, window: plain(*span, scale=scale, window=None))
    with pytest.raises(ConfigError, match="MistralForCausalLM gives other numbers for sequences packed together"):
        check_packing(policy, policy, CPU, key="model.path")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", REFUSED)
def test_what_packing_cannot_do_is_refused_with_the_reason(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model_type, extra, reason = REFUSED[family]
    path = make_model(tmp_path, small_config(model_type, extra))
    with pytest.raises(ConfigError, match=f"model.path.*{reason}") as caught:
        policy = load_policy(str(path), dtype=dtype, temperature=1.0, chunk_tokens=16).eval()
        check_packing(policy, policy, CPU, key=f"model.path={path}")
    assert "\n" not in str(caught.value)
