"""Splits linear layers and experts over tensor-parallel ranks by transformers' plan for the architecture.

Every rank holds ordinary tensors: its rows or columns of split layers, and all other layers in full. It also holds a
part of every expert, so all ranks have equal work, whatever the routing. Only two layer classes and the experts
communicate; the rest of the model is independent of ranks.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.compute.collectives import Group, Shard
from cluster.errors import ModelError

COLUMNS = "colwise"
GATHERED = "colwise_gather_output"
ROWS = "rowwise"
ROWS_OF_WHOLE = "rowwise_split_input"
WHOLE = frozenset(
    {
        "replicate",
        "replicated_with_grad_allreduce",
        "embedding_rowwise",
        "embedding_colwise",
        "mla_kv_a_proj",
        "local_params",  # of a module whose own parameters are split
    }
)
SPLIT = frozenset({COLUMNS, GATHERED, ROWS, ROWS_OF_WHOLE})
EXPERTS = "moe_tp_experts"  # a module whose parameters hold all experts, (experts, outputs, inputs)
PACKED_COLUMNS = "packed_colwise"  # of experts: gate and up projections, one after the other
PACKED_ROWS = "packed_rowwise"  # likewise, of experts stored with inputs before outputs, as in Llama 4
PACKED = frozenset({PACKED_COLUMNS, PACKED_ROWS})
# Plans by class, for models without one in transformers.
OWN_PLANS = {
    "StableLmForCausalLM": {
        **dict.fromkeys((f"model.layers.*.self_attn.{name}_proj" for name in "qkv"), COLUMNS),
        "model.layers.*.self_attn.o_proj": ROWS,
        **dict.fromkeys((f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up")), COLUMNS),
        "model.layers.*.mlp.down_proj": ROWS,
        "lm_head": GATHERED,
    }
}
HEAD_COUNTS = frozenset({"num_heads", "num_key_value_heads"})
ALIGNMENT = 16  # bytes, of rows of experts' weights (torch.nn.functional.grouped_mm)
# Dimensions to cut of experts' gate and up projections, and of their down projections.
CUT_DIMS = {PACKED_COLUMNS: 1, ROWS: 2, PACKED_ROWS: 2, COLUMNS: 1}


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a tensor held by a rank: `length` elements along `dim` from each of `begins` on, one after the other."""

    dim: int
    begins: tuple[int, ...]
    length: int

    def of(self, whole: Any) -> Tensor:
        """Returns the part of a tensor, or of a tensor in a safetensors file."""
        parts = [whole[(slice(None),) * self.dim + (slice(at, at + self.length),)] for at in self.begins]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


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
            inputs = inputs.narrow(-1, self.cut.begins[0], self.cut.length)
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
        shard = Shard(group, whole.out_features)
        cut = Cut(0, (shard.begin,), shard.own_columns)
        super().__init__(whole.in_features, cut.length, whole.bias is not None, **_kind(whole))
        self.cut = cut
        self.shard = shard

    def forward(self, inputs: Tensor) -> Tensor:
        return self.shard.gather(super().forward(inputs))


def check_plan(model: PreTrainedModel) -> None:
    """Raises ModelError if a model has no plan or its plan has an unsupported style; sets a plan of OWN_PLANS."""
    if not model.tp_plan and type(model).__name__ in OWN_PLANS:
        model.tp_plan = OWN_PLANS[type(model).__name__]
    if not model.tp_plan:
        raise ModelError(f"{type(model).__name__} has no tensor-parallel plan; use target.tensor_parallel: 1")
    known = SPLIT | WHOLE | {EXPERTS, PACKED_COLUMNS, PACKED_ROWS}
    styles = _styles(model)
    others = {name: style for name, style in styles.items() if style not in known}
    if others:
        shown = ", ".join(f"{name}: {style}" for name, style in list(others.items())[:3])
        raise ModelError(
            f"{type(model).__name__} needs tensor parallelism that is not supported ({shown});"
            " use target.tensor_parallel: 1"
        )
    for name in [name for name, style in styles.items() if style == EXPERTS]:
        if not _is_splittable(model.get_submodule(name), name, styles):
            raise ModelError(
                f"{type(model).__name__} has experts of a form that cannot be split ({name});"
                " use target.tensor_parallel: 1"
            )


def _is_splittable(experts: nn.Module, name: str, styles: dict[str, str]) -> bool:
    """Returns whether experts have up projections (experts, inner, hidden), or gate and up projections (experts, 2 *
    inner, hidden), with down projections (experts, hidden, inner) and no further parameters. Llama 4 exchanges the last
    dimensions of both.
    """
    shapes = {styles.get(f"{name}.{own}"): tuple(parameter.shape) for own, parameter in experts.named_parameters()}
    if len(list(experts.parameters())) != 2 or any(len(shape) != 3 for shape in shapes.values()):
        return False
    if shapes.keys() == {PACKED_COLUMNS, ROWS}:
        count, hidden, inner = shapes[ROWS]
        return shapes[PACKED_COLUMNS] == (count, 2 * inner, hidden)
    if shapes.keys() == {COLUMNS, ROWS}:  # without a gate
        count, hidden, inner = shapes[ROWS]
        return shapes[COLUMNS] == (count, inner, hidden)
    if shapes.keys() == {PACKED_ROWS, COLUMNS}:
        count, inner, hidden = shapes[COLUMNS]
        return shapes[PACKED_ROWS] == (count, hidden, 2 * inner)
    return False


def shard(model: PreTrainedModel, group: Group) -> dict[str, Cut]:
    """Replaces the model's empty layers with this rank's parts; returns the cut of each split parameter.

    The embedding is not split.
    """
    check_plan(model)
    cuts: dict[str, Cut] = {}
    styles = _styles(model)
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    for name in [name for name, style in styles.items() if style == EXPERTS]:
        cuts |= _split_experts(model.get_submodule(name), name, styles, group)
    for name, style in styles.items():
        if name in cuts:
            continue
        if style == COLUMNS and name in parameters:  # such as attention sinks
            cuts[name] = cut = _even_cut(0, len(parameters[name]), group)
            _replace(model, name, cut)
        elif style in SPLIT | PACKED:
            layer = modules.get(name)
            if not isinstance(layer, nn.Linear) or style in PACKED:
                raise ModelError(
                    f"cannot split {name} of a {type(model).__name__} ({style}); use target.tensor_parallel: 1"
                )
            local, cut = _split(layer, style, group)
            model.set_submodule(name, local)
            cuts[f"{name}.weight"] = cut
            if local.bias is not None and cut.dim == 0:
                cuts[f"{name}.bias"] = cut
    if type(model).__name__ in OWN_PLANS:  # such models store head counts in their layers
        for module in modules.values():
            for name in HEAD_COUNTS & vars(module).keys():
                setattr(module, name, getattr(module, name) // group.size)
    return cuts


def _split_experts(experts: nn.Module, name: str, styles: dict[str, str], group: Group) -> dict[str, Cut]:
    """Cuts every expert's inner width; sums the experts' outputs over the ranks. Returns the cuts by parameter."""
    cuts: dict[str, Cut] = {}
    for own, _ in list(experts.named_parameters(recurse=False)):
        at = f"{name}.{own}"
        whole = experts.get_parameter(own)
        dim = CUT_DIMS[styles[at]]
        cuts[at] = cut = _even_cut(dim, whole.shape[dim], group, blocks=2 if styles[at] in PACKED else 1)
        if cut.length * whole.itemsize % ALIGNMENT:
            raise ModelError(
                f"target.tensor_parallel is {group.size}, which leaves a rank {cut.length} units of each expert, but"
                f" their size must be a multiple of {ALIGNMENT} bytes; use fewer ranks"
            )
        _replace(experts, own, cut)
    experts.register_forward_hook(lambda _module, _inputs, partial: group.all_reduce(partial))
    return cuts


def _replace(module: nn.Module, name: str, cut: Cut) -> None:
    """Replaces a parameter by an empty one of the size of a cut."""
    owner, _, own = name.rpartition(".")
    whole = module.get_parameter(name)
    shape = list(whole.shape)
    shape[cut.dim] = cut.length * len(cut.begins)
    setattr(module.get_submodule(owner), own, nn.Parameter(whole.new_empty(shape), requires_grad=False))


def _styles(model: PreTrainedModel) -> dict[str, str]:
    """Returns the plan's style for each layer and parameter in it."""
    names = [name for named in (model.named_modules(), model.named_parameters()) for name, _ in named]
    plan = model.tp_plan
    styles = {name: plan[_in_plan(name)] for name in names if _in_plan(name) in plan}
    return styles | {name: COLUMNS for name in names if _is_norm_of_split_heads(name, styles, model)}


def _is_norm_of_split_heads(name: str, styles: dict[str, str], model: PreTrainedModel) -> bool:
    """Returns whether a parameter holds a norm's weights for each of the heads that ranks split, as in Cohere."""
    layer, _, own = name.rpartition(".")
    projection = layer.removesuffix("_norm") + "_proj"
    return own == "weight" and styles.get(projection) == COLUMNS and model.get_parameter(name).dim() == 2


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


def _even_cut(dim: int, size: int, group: Group, blocks: int = 1) -> Cut:
    """Cuts each of `blocks` equal blocks of a dimension."""
    block = size // blocks
    if size % blocks or block % group.size:
        raise ModelError(f"target.tensor_parallel is {group.size}; use a divisor of a layer's size, {block}")
    length = block // group.size
    return Cut(dim, tuple(at * block + group.rank * length for at in range(blocks)), length)


def _kind(layer: nn.Linear) -> dict[str, Any]:
    return {"device": layer.weight.device, "dtype": layer.weight.dtype}
