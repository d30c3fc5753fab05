"""Tests the encoding of hidden states: round trips, precision and invalid bytes."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.compute.hidden_states import decode_rows, encode_rows
from protos.messages import MAX_STATES_BYTES, StateDtype, StatesFormat

WIDTH = 48


def some_rows(seed: int, count: int, scale: float) -> torch.Tensor:
    drawn = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    drawn[:, 3] *= 40  # as in real states, a few elements are far larger
    return scale * drawn


def round_trip(rows: torch.Tensor, dtype: StateDtype) -> torch.Tensor:
    layout = StatesFormat(rows.shape[1], dtype)
    data = encode_rows(rows, dtype).numpy().tobytes()
    assert len(data) == len(rows) * layout.row_bytes
    return decode_rows(data, layout)


@pytest.mark.parametrize("given_as", [torch.float32, torch.bfloat16, torch.float16])
@given(seed=st.integers(0, 99), count=st.integers(0, 5), scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_bfloat16_comes_back_as_torch_rounds_it(given_as, seed, count, scale):
    rows = some_rows(seed, count, scale).to(given_as)
    assert torch.equal(round_trip(rows, StateDtype.BFLOAT16), rows.to(torch.bfloat16).float())


@given(seed=st.integers(0, 99), count=st.integers(1, 5), scale=st.sampled_from([1e-3, 1.0, 300.0]))
def test_eight_bits_keep_each_element_to_a_sixteenth_of_itself(seed, count, scale):
    """e4m3 has three bits after the first; below its smallest normal number, elements are kept to a part of that."""
    rows = some_rows(seed, count, scale)
    error = (round_trip(rows, StateDtype.FLOAT8) - rows).abs()
    least = rows.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max * 2**-10
    assert bool((error <= rows.abs() / 16 + least * 1.001).all())


def test_each_token_has_a_scale_of_its_own():
    rows = torch.cat([some_rows(1, 1, 1e-4), some_rows(2, 1, 1e4)])
    alone = round_trip(rows[:1], StateDtype.FLOAT8)
    assert torch.equal(round_trip(rows, StateDtype.FLOAT8)[:1], alone)
    assert bool(alone.any())


def test_a_zero_row_stays_zero():
    assert not round_trip(torch.zeros(2, WIDTH), StateDtype.FLOAT8).any()


def test_bytes_are_little_endian_with_the_scale_last():
    """Checks the wire format without torch."""
    data = encode_rows(torch.tensor([[1.0, -448.0]]), StateDtype.FLOAT8).numpy().tobytes()
    assert data == bytes([0x38, 0xFE]) + struct.pack("<f", 1.0)
    assert encode_rows(torch.tensor([[1.0, -2.0]]), StateDtype.BFLOAT16).numpy().tobytes() == bytes(
        [0x80, 0x3F, 0x00, 0xC0]
    )


@pytest.mark.parametrize("dtype", StateDtype)
def test_arbitrary_bytes_decode_to_finite_numbers(dtype):
    layout = StatesFormat(WIDTH, dtype)
    for fill in range(256):
        assert bool(torch.isfinite(decode_rows(bytes([fill]) * (2 * layout.row_bytes), layout)).all())


@pytest.mark.parametrize(
    ("dtype", "row_bytes"), [(StateDtype.BFLOAT16, 8192), (StateDtype.FLOAT8, 4100)], ids=["bfloat16", "float8"]
)
def test_rows_of_an_eight_billion_model_and_how_many_fit_a_message(dtype, row_bytes):
    layout = StatesFormat(4096, dtype)
    assert layout.row_bytes == row_bytes
    assert layout.rows_in_message == MAX_STATES_BYTES // row_bytes
    assert StatesFormat(1 << 18, dtype).rows_in_message >= 1
