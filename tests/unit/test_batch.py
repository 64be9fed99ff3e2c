"""The packed layout: packing, selecting, padding and merging move tokens without mixing them."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf.batch import Prompt, Rollout, last_token_batch, merge_scores, pack, pad, unpad
from rlhf.errors import SamplingError


def rollout(prompt_id: int, prompt: list[int], completion: list[int], finish_reason: str = "stop") -> Rollout:
    return Rollout(
        prompt=Prompt(id=prompt_id, token_ids=prompt, text=""),
        sample_index=0,
        token_ids=completion,
        versions=np.full(len(completion), 4, dtype=np.int32),
        finish_reason=finish_reason,
        logprobs=-np.asarray(completion, dtype=np.float32),
    )


@pytest.fixture
def batch():
    return pack([rollout(0, [1, 2], [3, 4, 5]), rollout(1, [6], [7], "length"), rollout(2, [8, 9, 10], [11, 12])])


def test_pack(batch) -> None:
    assert batch.tokens.tolist() == list(range(1, 13)) and batch.tokens.dtype == torch.int64
    assert batch.prompt_lengths.tolist() == [2, 1, 3]
    assert batch.completion_lengths.tolist() == [3, 1, 2]
    assert batch.truncated.tolist() == [False, True, False]
    assert batch.rollout_logprobs.tolist() == [-3, -4, -5, -7, -11, -12]
    assert batch.versions.tolist() == [4] * 6


def test_a_completion_without_log_probabilities_has_nan_for_them() -> None:
    asked, not_asked = rollout(0, [1], [2, 3]), replace(rollout(0, [1], [4, 5, 6]), logprobs=None)
    logprobs = pack([asked, not_asked]).rollout_logprobs
    assert logprobs is not None and logprobs.dtype == torch.float32
    assert str(logprobs.tolist()) == "[-2.0, -3.0, nan, nan, nan]"
    assert pack([not_asked]).rollout_logprobs is None


def test_a_log_probability_that_is_not_finite_is_named() -> None:
    odd = replace(rollout(5, [1], [2, 3]), sample_index=2, logprobs=np.array([-1.0, -np.inf], dtype=np.float32))
    with pytest.raises(SamplingError, match="prompt 5, completion 2: vLLM's log-probabilities are not all finite"):
        pack([rollout(0, [1], [4]), odd])


def test_a_whole_sequence_is_scored_before_a_token_appended_to_it() -> None:
    batch = last_token_batch([[1, 2, 3], [4]])
    assert batch.tokens.tolist() == [1, 2, 3, 3, 4, 4]
    assert batch.prompt_lengths.tolist() == [3, 1] and batch.completion_lengths.tolist() == [1, 1]
    assert batch.truncated.tolist() == [False, False] and batch.truncated.dtype == torch.bool
    assert batch.versions.tolist() == [0, 0] and batch.versions.dtype == torch.int32


def test_to_takes_every_tensor_along(batch) -> None:
    there = batch.with_(advantages=torch.arange(6.0)).to(torch.device("meta"))
    tensors = [tensor for tensor in vars(there).values() if tensor is not None]
    assert len(tensors) == 7 and all(tensor.device.type == "meta" for tensor in tensors)
    assert there.rewards is None


def test_select_reorders_every_field_alike(batch) -> None:
    batch = batch.with_(rewards=torch.tensor([0.0, 1.0, 2.0]), advantages=torch.arange(6.0))
    picked = batch.select([2, 0])
    assert picked.tokens.tolist() == [8, 9, 10, 11, 12, 1, 2, 3, 4, 5]
    assert picked.completion_lengths.tolist() == [2, 3]
    assert picked.rewards.tolist() == [2.0, 0.0]
    assert picked.advantages.tolist() == [4, 5, 0, 1, 2]
    assert picked.values is None


def test_neighbours_with_the_same_prompt_are_a_run() -> None:
    prompts = [[1, 2], [1, 2], [1, 3], [1], [1, 2]]
    batch = pack([rollout(i, prompt, [7] * (i + 1)) for i, prompt in enumerate(prompts)])
    assert batch.prompt_runs() == [range(2), range(2, 3), range(3, 4), range(4, 5)]


def test_who_has_no_reward_is_known_after_select_and_pickling(batch) -> None:
    assert batch.abstained.tolist() == [False] * 3, "before there are rewards, nobody is left out"
    batch = batch.with_(rewards=torch.tensor([0.0, math.nan, 2.0]))
    assert batch.abstained.tolist() == [False, True, False]
    assert pickle.loads(pickle.dumps(batch)).select([1, 0]).abstained.tolist() == [True, False]


def test_pad_and_unpad_are_inverse(batch) -> None:
    flat = torch.arange(6.0)
    padded = pad(flat, batch.completion_lengths)
    assert padded.tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0]]
    assert unpad(padded, batch.completion_lengths).tolist() == flat.tolist()


def test_merge_scores_puts_parts_back_in_order(batch) -> None:
    parts = [([2], torch.tensor([4.0, 5.0])), ([1, 0], torch.tensor([3.0, 0.0, 1.0, 2.0])), ([], torch.empty(0))]
    assert merge_scores(batch, parts).tolist() == [0, 1, 2, 3, 4, 5]


def test_merge_scores_refuses_a_missing_sequence(batch) -> None:
    with pytest.raises(AssertionError, match="every sequence exactly once"):
        merge_scores(batch, [([0, 1], torch.zeros(4))])
