"""Storages leave and come back in place: values, views and sharing survive."""

import torch

from rlhf.training.parking import Parking


def test_views_and_sharing_survive() -> None:
    whole = torch.arange(12, dtype=torch.float32)
    view, other = whole[4:8].view(2, 2), torch.arange(3, dtype=torch.bfloat16)
    parking = Parking(torch.device("cpu"))
    for visit in range(2):
        parking.park([whole, view, other])
        assert parking.parked
        assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        with parking.readable():
            assert view.tolist() == [[4.0 + visit, 5.0], [6.0, 7.0]]
            assert other.tolist() == [0.0, 1.0, 2.0]
            assert whole[11] == 11
        assert whole.untyped_storage().nbytes() == 0
        parking.unpark()
        assert whole.tolist() == [0, 1, 2, 3, 4 + visit, *range(5, 12)]
        view[0, 0] += 1  # still the same memory
        assert whole[4] == 5 + visit
    parking.unpark()  # nothing parked: nothing happens


def test_what_is_parked_may_change() -> None:
    parking, first = Parking(torch.device("cpu")), torch.ones(4)
    parking.park([first])
    parking.unpark()
    second = torch.full((9,), 2.0)
    parking.park([second, first])
    parking.unpark()
    assert second.tolist() == [2.0] * 9
    assert first.tolist() == [1.0] * 4
