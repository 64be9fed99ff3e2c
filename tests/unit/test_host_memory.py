"""Copies keep their bytes and lie where those of the round before lay, whatever was reserved."""

import io

import pytest
import torch

from rlhf.training.host_memory import ALIGNMENT, HostMemory, aligned, view_like


def storages(*values: float) -> list[torch.UntypedStorage]:
    """One for each value, of different sizes."""
    return [torch.full((5 + 20 * i,), value).untyped_storage() for i, value in enumerate(values)]


@pytest.mark.parametrize("reserved", [0, 1, 100, 10_000], ids=["nothing", "too-little", "some", "enough"])
def test_each_round_finds_the_memory_of_the_one_before(reserved: int) -> None:
    memory = HostMemory(torch.device("cpu"))
    if reserved:
        memory.reserve(reserved)
    rounds = []
    for values in ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0)):
        memory.clear()
        copies = [memory.copy(storage) for storage in storages(*values)]
        assert [copy.view(torch.float32).unique().tolist() for copy in copies] == [[value] for value in values]
        rounds.append([copy.data_ptr() for copy in copies])
    assert rounds[0] == rounds[1]
    assert len(set(rounds[0])) == 3


def test_what_is_reserved_is_exactly_enough() -> None:
    sizes = [storage.nbytes() for storage in storages(1.0, 2.0, 3.0)]
    memory = HostMemory(torch.device("cpu"))
    memory.reserve(sum(map(aligned, sizes)))
    first, second, third = (memory.copy(storage) for storage in storages(1.0, 2.0, 3.0))
    assert second.data_ptr() - first.data_ptr() == aligned(sizes[0]) == ALIGNMENT
    assert third.data_ptr() - second.data_ptr() == aligned(sizes[1])
    assert first.unique().tolist() == torch.tensor([1.0]).view(torch.uint8).unique().tolist()


def test_empty_storages_of_several_dtypes_are_saved_beside_others() -> None:
    """ZeRO-3's weights are empty. torch takes tensors for the same one by their address."""
    memory = HostMemory(torch.device("cpu"))
    memory.reserve(1 << 10)
    tensors = [torch.empty(0), torch.empty(0, dtype=torch.bfloat16), torch.ones(3, dtype=torch.int64), torch.empty(0)]
    copies = [view_like(tensor, memory.copy(tensor.untyped_storage())) for tensor in tensors]
    file = io.BytesIO()
    torch.save(copies, file)
    file.seek(0)
    assert [tensor.tolist() for tensor in torch.load(file)] == [[], [], [1, 1, 1], []]


def test_a_copy_is_saved_without_its_neighbours() -> None:
    memory = HostMemory(torch.device("cpu"))
    memory.reserve(1 << 20)
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)[:, 1]
    file = io.BytesIO()
    torch.save(view_like(tensor, memory.copy(tensor.untyped_storage())), file)
    assert len(file.getvalue()) < 4096
    file.seek(0)
    assert torch.load(file).tolist() == [1.0, 5.0, 9.0]
