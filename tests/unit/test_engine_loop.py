"""What of the rollout worker can be checked without an engine."""

from actors.rollouts.engine_loop import Request, request_seed, stamp
from rlhf.batch import Prompt


def test_tokens_carry_the_version_they_were_sampled_from() -> None:
    assert stamp(5, [], 7).tolist() == [7] * 5
    assert stamp(6, [(2, 3), (5, 4)], 5).tolist() == [3, 3, 4, 4, 4, 5]
    assert stamp(4, [(0, 1), (4, 2)], 3).tolist() == [2] * 4, (
        "weights changed before the first token and after the last"
    )


def test_a_sample_is_the_same_whoever_makes_it_and_however_often() -> None:
    prompt = Prompt(3, [1], "")
    first, again = (request_seed(0, Request(key, prompt, 1)) for key in ("8.1.0", "8.1.5"))
    assert first == again
    others = [Request("k", prompt, 2), Request("k", Prompt(4, [1], ""), 1), Request("k", prompt, 1, greedy=True)]
    assert len({first, request_seed(1, Request("k", prompt, 1)), *(request_seed(0, r) for r in others)}) == 5
