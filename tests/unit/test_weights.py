"""Buckets carry every parameter once, and their checksum notices what a transport may do to them."""

from pathlib import Path

import pytest
import torch

from rlhf.models import load_policy
from rlhf.weights import bucket_layout, checksum, gathered_buckets, gathered_state_dict, named_parameters, view_bucket


@pytest.fixture(scope="module")
def policy(tiny_model_dir: Path):
    return load_policy(str(tiny_model_dir), dtype=torch.float32, temperature=1.0, chunk_tokens=64)


@pytest.mark.parametrize("bucket_bytes", [1, 50_000, 1 << 30])
def test_buckets_hold_every_parameter_once(policy, bucket_bytes: int) -> None:
    seen = {}
    for bucket in gathered_buckets(policy, bucket_bytes, materialise=True):
        assert bucket is not None
        assert len(bucket.specs) == 1 or bucket.data.numel() <= bucket_bytes
        for spec in bucket.specs:
            assert spec.name not in seen
            seen[spec.name] = view_bucket(bucket.data, spec).clone()
    expected = dict(named_parameters(policy))
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], parameter) for name, parameter in expected.items())


def test_names_are_hugging_faces_and_tied_weights_come_once(policy) -> None:
    names = [spec.name for specs in bucket_layout(policy, 1 << 30) for spec in specs]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names  # tied


def test_state_dict_holds_tied_weights_under_both_names(policy) -> None:
    state = gathered_state_dict(policy)
    assert state is not None
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


@pytest.mark.parametrize("size", [1, 16, 4 * 8191, 100_003])
def test_checksum_notices_changes_and_swaps(size: int) -> None:
    data = torch.randint(1, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    original = checksum(data)
    assert checksum(data.clone()) == original
    for position in (0, size // 2, size - 1):
        changed = data.clone()
        changed[position] ^= 1
        assert checksum(changed) != original
    if size > 16:
        swapped = data.clone()
        swapped[:4], swapped[4:8] = data[4:8].clone(), data[:4].clone()
        assert checksum(swapped) != original
