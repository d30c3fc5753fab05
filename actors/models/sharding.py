"""Splits linear layers over tensor-parallel ranks by transformers' plan for the architecture.

Every rank holds ordinary tensors: its rows or columns of split layers, and all other layers in full. Only two layer
classes communicate; the rest of the model is independent of ranks.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.compute.collectives import Group
from cluster.errors import ModelError

COLUMNS = "colwise"
GATHERED = "colwise_gather_output"
ROWS = "rowwise"
ROWS_OF_WHOLE = "rowwise_split_input"
WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise"})
SPLIT = frozenset({COLUMNS, GATHERED, ROWS, ROWS_OF_WHOLE})


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a tensor held by a rank: `length` elements from `begin` on, along `dim`."""

    dim: int
    begin: int
    length: int

    @property
    def index(self) -> tuple[slice, ...]:
        """Index that selects the part."""
        return (slice(None),) * self.dim + (slice(self.begin, self.begin + self.length),)


class RowParallelLinear(nn.Linear):
    """Layer with some of the input columns; sums partial outputs over the ranks and adds the bias once."""

    def __init__(self, whole: nn.Linear, group: Group, inputs_are_split: bool) -> None:
        cut = _even_cut(1, whole.in_features, group)
        super().__init__(cut.length, whole.out_features, whole.bias is not None, **_kind(whole))
        self.cut = cut
        self.group = group
        self._inputs_are_split = inputs_are_split

    def forward(self, inputs: Tensor) -> Tensor:
        if not self._inputs_are_split:
            inputs = inputs.narrow(-1, self.cut.begin, self.cut.length)
        return self.reduce(F.linear(inputs, self.weight))

    def reduce(self, partial: Tensor) -> Tensor:
        """Sums this rank's `partial` product over the ranks, in place, and adds the bias."""
        self.group.all_reduce(partial)
        return partial if self.bias is None else partial.add_(self.bias)


class VocabularyParallelHead(nn.Linear):
    """LM head, or another gathered layer of a plan, with some of the output rows; gathers the outputs.

    If the size is not divisible, the last ranks hold fewer rows.
    """

    def __init__(self, whole: nn.Linear, group: Group) -> None:
        rows = -(-whole.out_features // group.size)
        begin = min(group.rank * rows, whole.out_features)
        cut = Cut(0, begin, min(rows, whole.out_features - begin))
        super().__init__(whole.in_features, cut.length, whole.bias is not None, **_kind(whole))
        self.cut = cut
        self._rows = rows
        self.group = group
        self._outputs = whole.out_features

    def forward(self, inputs: Tensor) -> Tensor:
        return self.gather(super().forward(inputs))

    def gather(self, local: Tensor) -> Tensor:
        """Gathers the columns of all ranks; returns the whole output."""
        gathered = self.group.all_gather(F.pad(local, (0, self._rows - local.shape[-1])))  # (ranks, ..., rows)
        return gathered.movedim(0, -2).flatten(-2)[..., : self._outputs]


def check_plan(model: PreTrainedModel) -> None:
    """Raises ModelError if a model has no plan or its plan has an unsupported style."""
    if not model.tp_plan:
        raise ModelError(f"{type(model).__name__} has no tensor-parallel plan; use target.tensor_parallel: 1")
    others = {name: style for name, style in _styles(model).items() if style not in SPLIT | WHOLE}
    if others:
        shown = ", ".join(f"{name}: {style}" for name, style in list(others.items())[:3])
        raise ModelError(
            f"{type(model).__name__} needs tensor parallelism that is not supported ({shown});"
            " use target.tensor_parallel: 1"
        )


def shard(model: PreTrainedModel, group: Group) -> dict[str, Cut]:
    """Replaces the model's empty layers with this rank's parts; returns the cut of each split parameter.

    The embedding is not split.
    """
    check_plan(model)
    cuts: dict[str, Cut] = {}
    for name, style in _styles(model).items():
        if style in SPLIT:
            layer = model.get_submodule(name)
            if not isinstance(layer, nn.Linear):
                raise ModelError(f"cannot split {name}, a {type(layer).__name__}; use target.tensor_parallel: 1")
            local, cut = _split(layer, style, group)
            model.set_submodule(name, local)
            cuts[f"{name}.weight"] = cut
            if local.bias is not None and cut.dim == 0:
                cuts[f"{name}.bias"] = cut
    return cuts


def _styles(model: PreTrainedModel) -> dict[str, str]:
    """Returns the plan's style for each layer and parameter in it."""
    names = [name for named in (model.named_modules(), model.named_parameters()) for name, _ in named]
    styles = {name: model.tp_plan.get(_in_plan(name)) for name in names}
    return {name: style for name, style in styles.items() if style is not None}


def _in_plan(name: str) -> str:
    """Returns a layer's name in the notation of plans, with `*` for layer numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _split(whole: nn.Linear, style: str, group: Group) -> tuple[nn.Linear, Cut]:
    if style == COLUMNS:
        cut = _even_cut(0, whole.out_features, group)
        return nn.Linear(whole.in_features, cut.length, whole.bias is not None, **_kind(whole)), cut
    layer: RowParallelLinear | VocabularyParallelHead
    if style == GATHERED:
        layer = VocabularyParallelHead(whole, group)
    else:
        layer = RowParallelLinear(whole, group, inputs_are_split=style == ROWS)
    return layer, layer.cut


def _even_cut(dim: int, size: int, group: Group) -> Cut:
    if size % group.size:
        raise ModelError(f"target.tensor_parallel is {group.size}; use a divisor of a layer's size, {size}")
    length = size // group.size
    return Cut(dim, group.rank * length, length)


def _kind(layer: nn.Linear) -> dict[str, Any]:
    return {"device": layer.weight.device, "dtype": layer.weight.dtype}
