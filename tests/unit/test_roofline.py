"""FLOPs by hand, and what nobody has measured stays unknown."""

from types import SimpleNamespace

from rlhf.roofline import device_peaks, forward_flops, shape_of, update_flops

CONFIG = SimpleNamespace(
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=3,
    vocab_size=100,
)


def test_shape_by_hand() -> None:
    shape = shape_of(CONFIG)
    # q and o: 16 x 32 each; k and v: 16 x 16 each; gate, up, down: 16 x 32 each
    assert shape.body_parameters == 3 * (2 * 16 * 32 + 2 * 16 * 16 + 3 * 16 * 32)
    assert shape.head_parameters == 1600


def test_forward_flops_by_hand() -> None:
    shape = shape_of(CONFIG)
    # two sequences of 5 and 3 tokens, 4 of them completion; causal scores and values: 2 * 3 layers * 32 * (25 + 9)
    expected = 2 * shape.body_parameters * 8 + 2 * 1600 * 4 + 2 * 3 * 32 * 34
    assert forward_flops(shape, [5, 3], 4) == expected
    assert update_flops(shape, [5, 3], 4) == 3 * expected


def test_peaks_are_known_or_none() -> None:
    known = device_peaks("NVIDIA H200")
    assert known is not None and known.flops == 790e12
    assert device_peaks("NVIDIA A100-SXM4-80GB") is not None
    assert device_peaks("Some Other GPU") is None
