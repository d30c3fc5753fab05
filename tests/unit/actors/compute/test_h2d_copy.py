"""Numbers for the device, in one tensor."""

import torch

from actors.compute.kv_cache import to_device

CPU = torch.device("cpu")


def test_parts_come_back_as_they_were_given_empty_ones_too():
    parts = [[3, 1], [], range(5, 8), (-1,)]
    assert [part.tolist() for part in to_device(parts, CPU)] == [[3, 1], [], [5, 6, 7], [-1]]


def test_all_parts_are_one_piece_of_memory():
    first, second = to_device([[1, 2, 3], [4]], CPU)
    assert second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


def test_numbers_are_exact_in_the_type_asked_for():
    (integers,) = to_device([[2**63 - 1, -(2**63)]], CPU)
    assert integers.tolist() == [2**63 - 1, -(2**63)]
    (fractions,) = to_device([[0.1, 1e-300]], CPU, torch.float64)
    assert fractions.tolist() == [0.1, 1e-300]
