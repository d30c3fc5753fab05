"""Matrix products with fixed weights: as stored, packed for the processor, or in fewer bits.

Decoding multiplies a few rows by very large weights. On a CPU, oneDNN reads weights in its own layout up to twice as
fast as a plain matrix. Products that may be approximate, as in a draft, read fewer bytes: `EightBitProjection` on CPUs,
`FloatEightProjection` and `FourBitProjection` on GPUs.
"""

import ctypes
import dis
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FASTEST_ROWS = 4  # with fewer rows, oneDNN takes up to 25 % longer
WIDENED_ROWS = 4  # fewer rows take less time than converting the weights
WIDENED_BYTES = 2**20  # of float32 weights at once; fits the second-level cache


class Projection(Protocol):
    """Computes y = x W^T + b for x of shape (..., inputs).

    A product of fewer than `fastest_rows` rows is not faster.
    """

    @property
    def fastest_rows(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Returns y + other; `other` has the shape of y."""
        ...


Product = Callable[[Tensor, Tensor | None], Projection]
"""Creates a projection from weights, (outputs, inputs), and an optional bias."""


class PlainProjection:
    """Multiplies by the weights as stored."""

    fastest_rows = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias) + other


class PackedProjection:
    """Multiplies by weights in oneDNN's layout, with the operators emitted by torch's compiler for frozen models."""

    fastest_rows = FASTEST_ROWS

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[-2]
        if rows < FASTEST_ROWS:
            x = F.pad(x, (0, 0, 0, FASTEST_ROWS - rows))
        y: Tensor = self._linear(x, self._weight, self._bias, "none", [], "")
        return y.narrow(-2, 0, rows)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        rows = x.shape[-2]
        if rows < FASTEST_ROWS:
            x, other = (F.pad(part, (0, 0, 0, FASTEST_ROWS - rows)) for part in (x, other))
        y: Tensor = self._linear_binary(x, other, self._weight, self._bias, "add")
        return y.narrow(-2, 0, rows)


class WidenedProjection:
    """Converts 16-bit weights to float32 block by block and multiplies there, for processors without 16-bit products.

    On such processors, torch multiplies 16-bit matrices row by row, which takes six times as long for 64 rows. Fewer
    than WIDENED_ROWS rows are multiplied by the weights as stored, which is faster, but rounds differently.
    """

    fastest_rows = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._plain = PlainProjection(weight, bias)
        self._blocks = torch.split(weight, max(1, WIDENED_BYTES // (4 * weight.shape[1])))
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() < WIDENED_ROWS:
            return self._plain(x)
        return self._product(x).to(x.dtype)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        if x.shape[:-1].numel() < WIDENED_ROWS:
            return self._plain.plus(x, other)
        return self._product(x).add_(other).to(x.dtype)

    def _product(self, x: Tensor) -> Tensor:
        x = x.float()
        y = torch.cat([F.linear(x, block.float()) for block in self._blocks], -1)
        return y if self._bias is None else y.add_(self._bias)


class TiledProjection:
    """Multiplies at most `tile` rows at a time; with `pads`, always `tile` rows, of which the last may be zeros."""

    def __init__(self, whole: Projection, tile: int, pads: bool = False) -> None:
        self.fastest_rows = tile if pads else whole.fastest_rows
        self._whole = whole
        self._tile = tile
        self._pads = pads

    def __call__(self, x: Tensor) -> Tensor:
        return self._by_tiles(self._whole, x)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self._by_tiles(self._whole.plus, x, other)

    def _by_tiles(self, product: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        rows = inputs[0].shape[-2]
        if rows <= self._tile and not self._pads:
            return product(*inputs)
        if self._pads and rows % self._tile:
            inputs = tuple(F.pad(part, (0, 0, 0, -rows % self._tile)) for part in inputs)
        tiles = zip(*(torch.split(part, self._tile, -2) for part in inputs), strict=True)
        results = [product(*tile) for tile in tiles]
        return (results[0] if len(results) == 1 else torch.cat(results, -2)).narrow(-2, 0, rows)


class EightBitProjection:
    """Quantizes weights to 8 bits with a scale per output, and activations with a scale per row; all else is float32.

    Uses the kernels of torch's dynamic quantization. The result is approximate.
    """

    fastest_rows = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.detach().float()
        scales = weight.abs().amax(dim=1).clamp_min_(torch.finfo(torch.float32).tiny) / 127
        zeros = torch.zeros(len(scales), dtype=torch.long)
        rounded = torch.quantize_per_channel(weight, scales, zeros, axis=0, dtype=torch.qint8)
        self._weight = torch.ops.quantized.linear_prepack(rounded, None)
        self._bias = None if bias is None else bias.detach()
        self._linear = torch.ops.quantized.linear_dynamic
        # Without VNNI, kernels add two products in 16 bits, so rows are rounded to 7 bits to avoid overflow.
        self._reduce_range = not torch.cpu._is_vnni_supported()

    def __call__(self, x: Tensor) -> Tensor:
        y = self._product(x)
        return y if self._bias is None else y.add_(self._bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)

    def _product(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() == 1:
            alone: Tensor = self._linear(x, self._weight, self._reduce_range)
            return alone
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
        together: Tensor = self._linear(x / largest, self._weight, self._reduce_range)  # one scale for all rows
        return together.mul_(largest)


def round_to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds rows to float8_e4m3fn; returns them and their scales, float32 of shape (..., 1)."""
    largest = x.abs().amax(dim=-1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny)
    scales = largest / torch.finfo(torch.float8_e4m3fn).max
    return (x / scales).to(torch.float8_e4m3fn), scales


class FloatEightProjection:
    """Rounds weights and activations to 8-bit floats, with a scale per output and per row; returns bfloat16.

    GPUs multiply them on tensor cores from compute capability 8.9 on. The result is approximate.
    """

    fastest_rows = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs = len(weight)
        self._weight, scales = round_to_float8(_padded_outputs(weight))
        self._scales = scales.t()
        self._bias = None if bias is None else bias.detach()

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Returns whether torch's kernel supports the shape."""
        return len(weight) >= OUTPUT_TILE and weight.shape[1] % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        rows, scales = round_to_float8(x.reshape(-1, x.shape[-1]))
        by_row = F.ScalingType.RowWise
        y = F.scaled_mm(rows, self._weight.t(), scales, by_row, self._scales, by_row, output_dtype=torch.bfloat16)
        y = y.view(*x.shape[:-1], y.shape[-1])[..., : self._outputs]
        return y if self._bias is None else y.add_(self._bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)


OUTPUT_TILE = 16  # kernels compute multiples of this number of outputs


def _padded_outputs(weight: Tensor) -> Tensor:
    """Returns weights, with rows of zeros up to a multiple of OUTPUT_TILE."""
    missing = -len(weight) % OUTPUT_TILE
    return F.pad(weight.detach(), (0, 0, 0, missing)) if missing else weight.detach()


GROUP = 64  # inputs that share a scale and a zero point
ROWS_AT_ONCE = 4096  # rows that are rounded at once, in float32
INNER_TILES = 8  # tiles of 16 inputs that a thread reads at once


def _four_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight, (outputs, inputs), to levels, uint8, with a scale and a zero per group, (outputs, groups,
    2); a weight is (level - 8) * scale + zero.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    scales = ((highest - lowest) / 15).clamp_min_(torch.finfo(torch.bfloat16).tiny)
    levels = ((groups - lowest) / scales).round_().clamp_(0, 15).to(torch.uint8).view_as(weight)
    return levels, torch.cat((scales, lowest + 8 * scales), -1).bfloat16()


class FourBitProjection:
    """Rounds weights to 4 bits, with a scale and a zero point per output and group of inputs; all else is bfloat16.

    Uses torch's tinygemm kernels, from compute capability 8.0 on. The result is approximate.
    """

    fastest_rows = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs = len(weight)
        weight = _padded_outputs(weight)
        parts = [_four_bits(block) for block in torch.split(weight, ROWS_AT_ONCE)]
        levels = torch.cat([part[0] for part in parts])
        self._scales = torch.cat([part[1] for part in parts]).transpose(0, 1).contiguous()  # (groups, outputs, 2)
        if weight.device.type == "cpu":
            self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), INNER_TILES)
            self._product = torch.ops.aten._weight_int4pack_mm_for_cpu
        else:
            pairs = levels[:, ::2] << 4 | levels[:, 1::2]
            self._weight = torch.ops.aten._convert_weight_to_int4pack(pairs, INNER_TILES)
            self._product = torch.ops.aten._weight_int4pack_mm
        self._bias = None if bias is None else bias.detach()

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Returns whether torch's kernels support the shape."""
        return len(weight) >= OUTPUT_TILE and weight.shape[1] % (16 * INNER_TILES) == 0

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._product(x.reshape(-1, x.shape[-1]), self._weight, GROUP, self._scales)
        y = y.view(*x.shape[:-1], y.shape[-1])[..., : self._outputs]
        return y if self._bias is None else y.add_(self._bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)


class SharedProjection:
    """Computes one rank's part of a product; `reduce` sums the parts of all ranks."""

    def __init__(self, part: Projection, reduce: Callable[[Tensor], Tensor]) -> None:
        self._part = part
        self._reduce = reduce
        self.fastest_rows = part.fastest_rows

    def __call__(self, x: Tensor) -> Tensor:
        return self._reduce(self._part(x))

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x) + other


def processor_multiplies(dtype: torch.dtype) -> bool:
    """Returns whether torch has a fast matrix product of this dtype for this processor.

    On x86, 16-bit floats need AVX-512.
    """
    if dtype is torch.bfloat16:
        return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def can_pack(weight: Tensor) -> bool:
    """Returns whether torch and the processor support the packed product of this weight."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return weight.dtype in (torch.bfloat16, torch.float32) and processor_multiplies(weight.dtype)


def is_widened(weight: Tensor) -> bool:
    """Returns whether several rows are multiplied faster in float32 than in the weight's dtype."""
    return weight.device.type == "cpu" and not processor_multiplies(weight.dtype)


def can_round(device: torch.device) -> bool:
    """Returns whether torch supports 8-bit integer products on this device."""
    return device.type == "cpu" and torch.backends.quantized.engine != "none"


def float_eight(weight: Tensor, bias: Tensor | None = None) -> Projection:
    """Returns a product with 8-bit floats, or an exact one if its kernel does not support the shape."""
    kind = FloatEightProjection if FloatEightProjection.takes(weight) else projection
    return kind(weight, bias)


def four_bit(weight: Tensor, bias: Tensor | None = None) -> Projection:
    """Returns a product with 4-bit weights, or an exact one if its kernel does not support the shape."""
    kind = FourBitProjection if FourBitProjection.takes(weight) else projection
    return kind(weight, bias)


def projection(weight: Tensor, bias: Tensor | None = None) -> Projection:
    """Returns the fastest product for weights of shape (outputs, inputs)."""
    if is_widened(weight):
        return WidenedProjection(weight.detach(), None if bias is None else bias.detach())
    return uniform_projection(weight, bias)


def uniform_projection(weight: Tensor, bias: Tensor | None = None) -> Projection:
    """Returns the fastest product that uses the same kernel for any number of rows."""
    weight = weight.detach()
    bias = bias.detach() if bias is not None else None
    return PackedProjection(weight, bias) if can_pack(weight) else PlainProjection(weight, bias)


TILES = (4, 8, 16, 32, 64, 256)  # rows
TRIED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 20, 24, 31, 32, 33, 40, 63, 64, 65, 80, 128, 200, 255, 256)


GPU_TILE = 128  # rows; up to about 200, an H100 takes the time of reading the weights


class InvariantProducts:
    """Creates products that give a row the same bits whatever other rows there are.

    How a product rounds depends on its shape alone. On a GPU, all products have GPU_TILE rows. On a CPU, trials find
    the largest tile within which this processor multiplies rows alike; weights of one shape share a trial.
    """

    def __init__(self, product: Product = uniform_projection) -> None:
        self._product = product
        self._tiles: dict[tuple[torch.Size, torch.dtype, bool], int] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Projection:
        whole = self._product(weight, bias)
        if weight.device.type != "cpu":
            return TiledProjection(whole, GPU_TILE, pads=True)
        shape = weight.shape, weight.dtype, bias is not None
        if shape not in self._tiles:
            self._tiles[shape] = _invariant_tile(whole, weight)
        return TiledProjection(whole, self._tiles[shape])


@torch.inference_mode()
def _invariant_tile(whole: Projection, weight: Tensor) -> int:
    """Returns the largest of TILES up to which the number of rows does not change a row's result."""
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = weight.shape
    x, other = (
        torch.randn(TILES[-1], size, generator=generator).to(weight.device, weight.dtype) for size in (inputs, outputs)
    )
    tile = TILES[0]
    for rows in TRIED_ROWS:
        smaller = TiledProjection(whole, tile)
        full = -(-rows // tile) * tile
        expected = smaller(x[:full])[:rows], smaller.plus(x[:full], other[:full])[:rows]
        tried = whole(x[:rows]), whole.plus(x[:rows], other[:rows])
        if not all(map(torch.equal, tried, expected)):
            break
        tile = rows if rows in TILES else tile
    return tile


class PackedLinear(nn.Module):
    """Replacement for an `nn.Linear` that uses a `Projection`."""

    def __init__(self, linear: nn.Linear, product: Product) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._projection = product(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._projection(x)


def pack_linears(model: nn.Module, product: Product = projection) -> None:
    """Replaces every `nn.Linear` of a model that can be packed or widened. A tied embedding keeps its weights.

    With another product than `projection`, replaces all of them, on every device. Skips layers whose weight is read
    directly by the model's code, as in some mixture-of-experts routers.
    """
    names = [
        f"{parent_name}.{own_name}".removeprefix(".")
        for parent_name, parent in model.named_modules()
        for own_name, child in parent.named_children()
        if type(child) is nn.Linear
        and _is_plain(child)
        and (can_pack(child.weight) or is_widened(child.weight) or product is not projection)
        and not _reads_weight(type(parent), own_name)
    ]
    for name in names:
        _pack(model, name, product)  # holds no other layer, so that each is freed as it is replaced
        trim_heap()


def _is_plain(linear: nn.Linear) -> bool:
    """Returns whether a layer only multiplies its inputs by its weight.

    Quantization libraries rename or encode the weights, and replace `forward` to round the inputs.
    """
    weight = getattr(linear, "weight", None)
    return (
        "forward" not in vars(linear)
        and weight is not None
        and weight.is_floating_point()
        and weight.dtype.itemsize > 1
    )


def _pack(model: nn.Module, name: str, product: Product) -> None:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear), "only such layers are packed"
    model.set_submodule(name, PackedLinear(linear, product))


def trim_heap() -> None:
    """Returns freed memory to the system; without glibc, does nothing.

    Once a large block was freed, glibc allocates blocks of its size from the heap, which retains memory between blocks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reads_weight(kind: type[nn.Module], child: str) -> bool:
    """Returns whether a method of a transformers class reads its child's weight directly.

    Inspects bytecode, because `inspect.getsource` parses the file, which is not thread-safe in Python 3.11.
    """
    if not kind.__module__.startswith("transformers."):
        return False
    names = [
        instruction.argval
        for method in vars(kind).values()
        if inspect.isfunction(method)
        for instruction in dis.get_instructions(inspect.unwrap(method))
    ]
    return (child, "weight") in pairwise(names)
