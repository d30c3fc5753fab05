"""Ranks with shared memory exchange whole tensors in order, and never read them too early."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from actors.compute.collectives import Group, HostGroup, OrderedGroup, SingleRank, TorchGroup
from tests.unit.actors.groups import at_once

pytestmark = pytest.mark.timeout(60)  # inconsistent ranks wait forever
LARGE = 1_000_003  # spans several chunks


def host_groups(folder: Path, size: int) -> list[HostGroup]:
    return [HostGroup(rank, size, folder / "shared") for rank in range(size)]


def on_all(groups: list[HostGroup], call: Callable[[Group], Tensor]) -> list[Tensor]:
    return at_once([partial(call, group) for group in groups])


def numbers(group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(group.rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 7), (LARGE,)])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_and_gathers(tmp_path, size, shape, dtype):
    groups = host_groups(tmp_path, size)

    def both(group: Group) -> Tensor:
        tensor = numbers(group, shape, dtype)
        gathered = group.all_gather(tensor)
        group.all_reduce(tensor)
        return torch.cat([gathered, tensor.unsqueeze(0)])

    expected = torch.stack([numbers(group, shape, dtype) for group in groups])
    found = on_all(groups, both)
    for each in found:
        assert torch.equal(each[:-1], expected)
        assert torch.equal(each[-1], found[0][-1]), "every rank gets the same bits"
        precision = {"rtol": 0.0, "atol": 16 * torch.finfo(dtype).eps}
        torch.testing.assert_close(each[-1].double(), expected.double().sum(0), **precision)


@pytest.mark.parametrize("work", [0, 20_000], ids=["awake", "asleep"])
def test_a_thousand_exchanges_in_a_row_are_never_mixed_up(tmp_path, work):
    """Ranks wait by spinning, and by sleeping for a rank that works between exchanges."""

    def chain(group: Group) -> Tensor:
        sums = []
        for step in range(1000):
            if step % 60 == 20 * group.rank:
                sum(range(work))
            tensor = torch.full((step % 17 + 1,), float(step * (group.rank + 1)))
            group.all_reduce(tensor)
            sums.append(float(tensor.sum()))
        return torch.tensor(sums)

    steps = torch.arange(1000)
    for found in on_all(host_groups(tmp_path, 3), chain):
        assert torch.equal(found, (steps * 6 * (steps % 17 + 1)).float())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_an_ordered_sum_of_an_element_does_not_depend_on_the_others(tmp_path, size):
    shape = (3, 7)

    def both(group: Group) -> Tensor:
        whole = numbers(group, shape, torch.bfloat16)
        part = whole[1:, :2].clone()
        for tensor in (whole, part):
            OrderedGroup(group).all_reduce(tensor)
        assert torch.equal(whole[1:, :2], part)
        return whole

    groups = host_groups(tmp_path, size)
    expected = numbers(groups[0], shape, torch.bfloat16)
    for group in groups[1:]:
        expected = expected + numbers(group, shape, torch.bfloat16)
    assert all(torch.equal(found, expected) for found in on_all(groups, both))


def test_a_single_rank_communicates_with_no_one():
    tensor = torch.tensor([1.0, 2.0])
    SingleRank().all_reduce(tensor)
    assert tensor.tolist() == [1.0, 2.0]
    assert SingleRank().all_gather(tensor).tolist() == [[1.0, 2.0]]


def test_fake_tensors_are_not_exchanged():
    """A check of a model's code runs on one rank alone."""
    group = Mock(spec=TorchGroup, rank=0, size=2)
    with FakeTensorMode():
        TorchGroup.all_reduce(group, torch.ones(3))
        assert TorchGroup.all_gather(group, torch.ones(3)).shape == (2, 3)
