"""Packed products equal `F.linear`, and 8-bit products nearly do."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from actors.compute.linear import (
    EightBitProjection,
    FloatEightProjection,
    FourBitProjection,
    InvariantProducts,
    PackedLinear,
    PackedProjection,
    PlainProjection,
    TiledProjection,
    WidenedProjection,
    can_pack,
    can_round,
    float_eight,
    four_bit,
    pack_linears,
    projection,
)

DTYPES = [pytest.param(torch.float32, 1e-5, id="float32"), pytest.param(torch.bfloat16, 2e-2, id="bfloat16")]


def weights(dtype: torch.dtype, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(1)
    weight = torch.randn(24, 16, dtype=dtype)
    if not can_pack(weight):
        pytest.skip(f"this processor has no packed product in {dtype}")
    return weight, torch.randn(24, dtype=dtype) if with_bias else None


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_a_packed_product_equals_the_plain_one(rows, with_bias, dtype, tolerance):
    weight, bias = weights(dtype, with_bias)
    packed = projection(weight, bias)
    assert isinstance(packed, PackedProjection)
    for shape in ((rows, 16), (1, rows, 16)):
        x = torch.randn(shape, dtype=dtype)
        other = torch.randn(*shape[:-1], 24, dtype=dtype)
        expected = F.linear(x, weight, bias)
        torch.testing.assert_close(packed(x), expected, atol=tolerance, rtol=tolerance)
        kept = other.clone()
        torch.testing.assert_close(packed.plus(x, other), expected + other, atol=3 * tolerance, rtol=tolerance)
        torch.testing.assert_close(other, kept, msg="what is added to must stay: it may be used again")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 16), (700, 1000)], ids=["one block", "several blocks"])
def test_widened_products_round_only_their_result(rows, with_bias, dtype, outputs, inputs):
    torch.manual_seed(1)
    weight = torch.randn(outputs, inputs, dtype=dtype)
    bias = torch.randn(outputs, dtype=dtype) if with_bias else None
    widened = WidenedProjection(weight, bias)
    x = torch.randn(1, rows, inputs, dtype=dtype)
    other = torch.randn(1, rows, outputs, dtype=dtype)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps * inputs**0.5}
    torch.testing.assert_close(widened(x), exact.to(dtype), **close)
    kept = other.clone()
    torch.testing.assert_close(widened.plus(x, other), (exact + other).to(dtype), **close)
    torch.testing.assert_close(other, kept, msg="what is added to must stay: it may be used again")


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_unpackable_weights_use_the_plain_product(with_bias):
    weight = torch.randn(24, 16, dtype=torch.float64)
    bias = torch.randn(24, dtype=torch.float64) if with_bias else None
    plain = projection(weight, bias)
    assert isinstance(plain, PlainProjection)
    x = torch.randn(3, 16, dtype=torch.float64)
    other = torch.randn(3, 24, dtype=torch.float64)
    torch.testing.assert_close(plain(x), F.linear(x, weight, bias))
    torch.testing.assert_close(plain.plus(x, other), F.linear(x, weight, bias) + other)


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_an_8_bit_product_differs_only_by_rounding(rows, with_bias):
    """Each factor's error is at most half a step: 1/254 of its row's maximum, or 1/127 with 7 bits."""
    if not can_round(torch.device("cpu")):
        pytest.skip("this build of torch has no products in 8 bits")
    torch.manual_seed(1)
    weight = torch.randn(24, 16)
    bias = torch.randn(24) if with_bias else None
    eight = EightBitProjection(weight, bias)
    for shape in ((rows, 16), (1, rows, 16)):
        x = torch.randn(shape)
        other = torch.randn(*shape[:-1], 24)
        expected = F.linear(x, weight, bias)
        kept = other.clone()
        off_x = x.abs().amax(-1, keepdim=True) / 127
        off_weight = weight.abs().amax(-1) / 254
        bound = 16 * (off_x * weight.abs().amax(-1) + x.abs().amax(-1, keepdim=True) * off_weight)
        assert ((eight(x) - expected).abs() <= bound).all()
        assert ((eight(x) - expected).norm() / expected.norm()) < 0.03
        torch.testing.assert_close(eight.plus(x, other), eight(x) + other)
        torch.testing.assert_close(other, kept)


def test_a_large_row_costs_the_others_nothing():
    """The first token of a prompt is often a hundred times the others."""
    torch.manual_seed(1)
    eight = EightBitProjection(torch.randn(24, 16), None)
    x = torch.randn(3, 16)
    beside = torch.cat((1000 * x[:1], x))
    torch.testing.assert_close(eight(beside)[1:], eight(x), atol=0.2, rtol=0.0)
    assert (eight(beside)[1:] - eight(x)).norm() / eight(x).norm() < 0.01


def test_rows_and_weights_of_zeros_give_zeros():
    eight = EightBitProjection(torch.zeros(24, 16), None)
    assert not eight(torch.zeros(3, 16)).any()
    assert not eight(torch.zeros(1, 16)).any()


@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", [(1,), (9,), (2, 3)])
@pytest.mark.parametrize(
    ("kind", "off"),
    [(FloatEightProjection, 0.05), (FourBitProjection, 0.12)],  # normal weights: 3 bits of mantissa, 16 levels
)
@pytest.mark.parametrize("outputs", [48, 41])  # kernels compute multiples of 16
def test_gpu_products_in_fewer_bits_differ_only_by_rounding(kind, off, shape, with_bias, outputs):
    torch.manual_seed(1)
    weight = torch.randn(outputs, 256).bfloat16()
    bias = torch.randn(outputs).bfloat16() if with_bias else None
    rounded = kind(weight, bias)
    x, other = (torch.randn(*shape, size).bfloat16() for size in (256, outputs))
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert rounded(x).shape == expected.shape
    assert ((rounded(x).float() - expected).norm() / expected.norm()) < off
    kept = other.clone()
    torch.testing.assert_close(rounded.plus(x, other), rounded(x) + other)
    torch.testing.assert_close(other, kept)


@pytest.mark.parametrize("kind", [FloatEightProjection, FourBitProjection])
def test_gpu_products_in_fewer_bits_keep_zeros_and_large_rows_apart(kind):
    torch.manual_seed(1)
    x = torch.randn(3, 256).bfloat16()
    assert not kind(torch.zeros(48, 256).bfloat16(), None)(x).any()
    rounded = kind(torch.randn(48, 256).bfloat16(), None)
    beside = torch.cat((1000 * x[:1], x))
    torch.testing.assert_close(rounded(beside)[1:], rounded(x))


@pytest.mark.parametrize(("product", "outputs", "inputs"), [(float_eight, 48, 250), (four_bit, 48, 192)])
def test_shapes_without_a_kernel_are_multiplied_exactly(product, outputs, inputs):
    weight = torch.randn(outputs, inputs)
    x = torch.randn(2, inputs)
    torch.testing.assert_close(product(weight, None)(x), F.linear(x, weight))


def test_other_products_replace_linears_that_cannot_be_packed():
    """On a GPU, no weight can be packed."""
    model: Any = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64))
    pack_linears(model)
    assert type(model[0]) is nn.Linear
    pack_linears(model, PlainProjection)
    assert type(model[0]) is PackedLinear


class Special(nn.Linear):
    """Layer with its own forward method."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def test_every_plain_linear_of_a_model_is_packed_and_special_ones_are_left_alone():
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 6, bias=False)), Special(6, 4))
    x = torch.randn(2, 8)
    expected = model(x)
    pack_linears(model)
    assert [type(model[0]), type(model[1][1]), type(model[2])] == [PackedLinear, PackedLinear, Special]
    assert (model[0].in_features, model[1][1].out_features) == (8, 6)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)


def test_packing_leaves_a_tied_embedding_whole():
    model: Any = nn.ModuleDict({"embedding": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["embedding"].weight
    pack_linears(model)
    with torch.inference_mode():
        hidden = model["embedding"](torch.tensor([3, 7]))
        torch.testing.assert_close(model["head"](hidden), hidden @ model["embedding"].weight.T)


class _SplitProjection(PlainProjection):
    """Rounds differently in products of more than `limit` rows."""

    limit = 20

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.most = 0  # rows of the largest product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, len(x))
        y = x.double() @ self._weight.double().T
        return y.float() * (1 + 1e-6 * (len(x) > self.limit))

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(x) + other


def test_invariant_products_stay_below_the_number_of_rows_that_changes_a_row():
    made = []

    def product(weight: torch.Tensor, bias: torch.Tensor | None) -> PlainProjection:
        made.append(_SplitProjection(weight, bias))
        return made[-1]

    products = InvariantProducts(product)
    weight = torch.randn(24, 16)
    products(weight)
    tiled = products(weight)  # this shape has been tried
    x, other = torch.randn(70, 16), torch.randn(70, 24)
    alone = torch.cat([tiled(row) for row in x.split(1)])
    assert torch.equal(tiled(x), alone)
    assert torch.equal(tiled.plus(x, other), alone + other)
    assert 4 < made[-1].most <= _SplitProjection.limit


class _CountedProjection(PlainProjection):
    """Records the number of rows of each product."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight, None)
        self.rows: set[int] = set()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.add(len(x))
        return super().__call__(x)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        assert len(other) == len(x)
        return self(x) + other


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16, 21])
def test_padded_tiles_have_one_number_of_rows(rows):
    whole = _CountedProjection(torch.randn(24, 16))
    tiled = TiledProjection(whole, 8, pads=True)
    x, other = torch.randn(rows, 16), torch.randn(rows, 24)
    alone = torch.cat([tiled(row) for row in x.split(1)])
    assert torch.equal(tiled(x), alone)
    assert torch.equal(tiled.plus(x, other), alone + other)
    assert whole.rows == {8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_sum_with_few_rows_rounds_as_with_many(dtype):
    weight, bias = weights(dtype, True)
    packed = projection(weight, bias)
    x, other = torch.randn(64, 16, dtype=dtype), torch.randn(64, 24, dtype=dtype)
    together = packed.plus(x, other)
    assert torch.equal(torch.cat([packed.plus(*row) for row in zip(x.split(1), other.split(1), strict=True)]), together)


def test_four_bit_weights_are_rounded_alike_in_any_number_of_rows():
    torch.manual_seed(1)
    weight = torch.randn(8192 + 48, 128).bfloat16()
    x = torch.randn(2, 128).bfloat16()
    parts = [FourBitProjection(part, None)(x) for part in weight.split(48)]
    torch.testing.assert_close(FourBitProjection(weight, None)(x), torch.cat(parts, -1))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, None])
def test_compressed_layers_keep_their_own_products(dtype):
    """Their weights are meaningless without scales, or have other names."""
    model: Any = nn.Sequential(nn.Linear(8, 8))
    del model[0].weight
    if dtype is not None:
        model[0].weight = torch.zeros(8, 8, dtype=dtype)
    pack_linears(model, PlainProjection)
    assert type(model[0]) is nn.Linear
