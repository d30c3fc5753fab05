"""Location and tensor names of a checkpoint's multi-token prediction module.

Layouts differ in names, in the order in which embedding and state are concatenated, and in whether the embedding at
position 0 is replaced by zeros, as in vLLM's deepseek_mtp.py and mimo_mtp.py.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from cluster.errors import ModelError

LAYER = re.compile(
    r"layers\.0\.(input_layernorm|post_attention_layernorm|self_attn\.([qkvo]_proj|[qk]_norm)"
    r"|mlp\.(gate|up|down)_proj)\.(weight|bias)"
)
"""Tensors of a decoder layer of the Llama kind."""


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Names of the tensors outside the decoder layer, by their EAGLE names; all begin with `prefix`."""

    name: str
    prefix: str
    fc: str
    embedding_norm: str
    state_norm: str
    last_norm: str
    layer: str = ""  # prefix of the decoder layer's names
    lm_head: str = ""
    state_first: bool = False  # the state is concatenated before the embedding
    hides_first: bool = False  # the embedding at position 0 is zero

    def own_name(self, stored: str) -> str:
        """Returns the EAGLE name of a stored tensor."""
        name = stored.removeprefix(self.prefix)
        module, _, kind = name.rpartition(".")
        known = {
            self.fc: "fc",
            self.embedding_norm: "embed_layernorm",
            self.state_norm: "state_layernorm",
            self.last_norm: "lm_head_layernorm",
            self.lm_head: "lm_head",
            "embed_tokens": "embed_tokens",
        }
        return f"{known[module]}.{kind}" if module in known else f"layers.0.{name.removeprefix(self.layer)}"


def layouts_of(layers: int) -> tuple[MtpLayout, ...]:
    """Returns the known layouts, for a target with `layers` layers."""
    deepseek = MtpLayout(
        name="DeepSeek's",
        prefix=f"model.layers.{layers}.",
        fc="eh_proj",
        embedding_norm="enorm",
        state_norm="hnorm",
        last_norm="shared_head.norm",
        lm_head="shared_head.head",
        hides_first=True,
    )
    mimo = MtpLayout(
        name="MiMo's",
        prefix="model.mtp_layers.0.",
        fc="input_proj",
        embedding_norm="token_layernorm",
        state_norm="hidden_layernorm",
        last_norm="final_layernorm",
        state_first=True,
        hides_first=True,
    )
    qwen = MtpLayout(
        name="Qwen's",
        prefix="mtp.",
        fc="fc",
        embedding_norm="pre_fc_norm_embedding",
        state_norm="pre_fc_norm_hidden",
        last_norm="norm",
        layer="layers.0.",
    )
    return deepseek, mimo, qwen


def layout_in(stored: Iterable[str], layers: int, where: str) -> MtpLayout:
    """Returns the layout of a checkpoint with these tensors. Raises ModelError if it is unknown."""
    names = set(stored)
    for layout in layouts_of(layers):
        if f"{layout.prefix}{layout.fc}.weight" in names:
            return layout
    looked_for = ", ".join(f"{layout.prefix}{layout.fc}.weight" for layout in layouts_of(layers))
    raise ModelError(
        f"{where} holds no multi-token prediction module that is known here: none of {looked_for}; use a target that"
        " comes with one, or another drafting method"
    )


def module_count(stored: Iterable[str], layout: MtpLayout) -> int:
    """Counts the modules of a checkpoint with these tensors: they are numbered consecutively from the first."""
    first = re.fullmatch(r"(.*?)(\d+)\.", layout.prefix + layout.layer)
    assert first is not None, "what a module's layer begins with ends in a number"
    numbered = re.compile(rf"{re.escape(first[1])}(\d+)\.")
    numbers = {int(match[1]) for name in stored if (match := numbered.match(name))}
    return next(found for found in count() if int(first[2]) + found not in numbers)


def check_layer(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises ModelError unless the decoder layer is of the Llama kind."""
    others = sorted(name for name in tensors if name.startswith("layers.") and not LAYER.fullmatch(name))
    if others:
        shown = ", ".join(name.removeprefix("layers.0.") for name in others[:4])
        raise ModelError(
            f"the multi-token prediction module in {where} has a decoder layer with {shown}, expected queries, keys,"
            " values and a gated MLP, as Llama and Qwen have; experts and latent attention are not supported"
        )
