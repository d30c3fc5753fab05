"""Resolves the configuration of a DFlash head from its files and the target's shape.

DFlash: z-lab/dflash, dflash/model.py, arXiv 2602.06036. There are two published layouts. z-lab's layout has options at
the top level or in `dflash_config`; the layout of speculators describes the decoder in `transformer_layer_config`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.drafters.heads.files import HeadFiles
from actors.drafters.heads.rope import Rope, TargetShape, rope_of
from cluster.errors import ModelError
from protos.messages import StatesNeeded

BLOCK_SIZE = 16  # used if the configuration sets none
OUTPUTS_KEY = "target_layer_ids"  # ids of the layers whose outputs the head reads
STATES_KEYS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")  # ids of states (layer inputs)
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
MASK_FILE = "mask_embedding.pt"  # embedding of an added mask token
REFUSED: Mapping[str, tuple[Any, ...]] = {  # unsupported options and the values that disable them
    "sample_from_anchor": (None, False),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "use_gemma_norm": (None, False),
    "rope_is_neox_style": (None, True),
    "is_neox_style": (None, True),
    "projector_type": (None, "dflash"),
    "quantization_config": (None,),
    "hidden_act": (None, "silu"),
}


@dataclass(frozen=True, slots=True)
class DFlashLayerKind:
    """Attention pattern of one layer."""

    is_causal: bool  # block positions ignore later positions
    window: int | None  # visible positions in either direction, including its own; None: all


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes and conventions of a head."""

    layers: tuple[DFlashLayerKind, ...]
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # epsilon of the norms
    rope: Rope
    block_size: int  # the last committed token and the following masks
    mask_token: int
    vocabulary: int  # vocabulary size of the target
    columns: int  # columns of the published logits
    needs: StatesNeeded
    embedding_scale: float
    logit_scale: float
    logit_cap: float | None

    def describe(self) -> list[str]:
        """Describes the resolved configuration, one fact per line."""
        kinds = [
            f"{'causal' if kind.is_causal else 'bidirectional'}{f' over {kind.window}' if kind.window else ''}"
            for kind in self.layers
        ]
        size = f"DFlash head of {len(self.layers)} layer(s) of {self.hidden}, MLP {self.intermediate}"
        return [
            f"{size}, {self.heads} heads, {self.kv_heads} key-value heads of {self.head_dim}, eps {self.eps:g}",
            f"reads the target's states {list(self.needs.layers)} (k: after k layers), {self.needs.width} elements",
            f"blocks of {self.block_size - 1} tokens, mask token {self.mask_token}, {self.rope}",
            f"layers attend: {', '.join(kinds)}",
            f"proposes {self.columns} of {self.vocabulary} tokens",
        ]


def resolve_dflash(files: HeadFiles, target: TargetShape) -> DFlashConfig:
    """Resolves a head's configuration.

    Raises ModelError if the files contain no DFlash head, or the head does not match the target or needs an unsupported
    option.
    """
    return _Resolution(files, target).config()


class _Resolution:
    """Merges the options in `dflash_config`, at the top level, and in the decoder's section."""

    def __init__(self, files: HeadFiles, target: TargetShape) -> None:
        self._files = files
        self._target = target
        nested = files.config.get("dflash_config") or {}
        self._decoder = files.config.get("transformer_layer_config") or files.config
        sections = (self._decoder, files.config, nested)  # the last takes precedence
        self._options = {key: value for section in sections for key, value in section.items() if value is not None}
        self._nested = nested

    def config(self) -> DFlashConfig:
        for name, harmless in REFUSED.items():
            if self._options.get(name) not in harmless:
                raise self._wrong(name, "which is not supported; use another head")
        hidden = self._size("hidden_size")
        heads = self._size("num_attention_heads")
        vocabulary = self._size("vocab_size")
        if vocabulary != self._target.vocabulary or hidden != self._target.hidden:
            raise ModelError(
                f"{self._files.folder} was made for a target with {vocabulary} tokens and a hidden size of {hidden},"
                f" but the target has {self._target.vocabulary} and {self._target.hidden}; use another head"
            )
        cap = self._options.get("final_logit_softcapping")
        return DFlashConfig(
            layers=self._layers(),
            hidden=hidden,
            intermediate=self._size("intermediate_size"),
            heads=heads,
            kv_heads=self._size("num_key_value_heads", heads),
            head_dim=self._size("head_dim", hidden // heads),
            eps=float(self._options.get("rms_norm_eps", 1e-6)),
            rope=rope_of({**self._decoder, "layer_types": self._options.get("layer_types")}),
            block_size=self._block_size(),
            mask_token=self._mask_token(vocabulary),
            vocabulary=vocabulary,
            columns=self._columns(vocabulary),
            needs=self._needs(),
            embedding_scale=float(self._options.get("input_embedding_scale") or 1.0),
            logit_scale=float(self._options.get("output_multiplier") or 1.0),
            logit_cap=float(cap) if cap else None,
        )

    def _wrong(self, name: str, expected: str) -> ModelError:
        return ModelError(
            f"{name} in the config.json of {self._files.folder} is {self._options.get(name)!r}, {expected}"
        )

    def _size(self, name: str, default: int | None = None) -> int:
        return self._files.size(self._options, name, default)

    def _block_size(self) -> int:
        size = self._size("block_size", BLOCK_SIZE)
        if size < 2:
            raise self._wrong(
                "block_size", "expected at least 2: the last committed token and one mask per draft token; correct it"
            )
        return size

    def _layers(self) -> tuple[DFlashLayerKind, ...]:
        count = self._size("num_hidden_layers")
        types = self._options.get("layer_types") or ["full_attention"] * count
        if len(types) != count or not set(types) <= {"full_attention", "sliding_attention"}:
            raise self._wrong(
                "layer_types",
                f"expected full_attention or sliding_attention for each of {count} layers; use another head",
            )
        if self._options.get("use_swa") and "sliding_attention" not in types:
            raise self._wrong("use_swa", "but layer_types contains no sliding_attention; correct one of them")
        return tuple(self._layer(kind == "sliding_attention") for kind in types)

    def _layer(self, is_sliding: bool) -> DFlashLayerKind:
        """Resolves one layer. `is_causal` takes precedence over `causal` in `dflash_config`. By default, only sliding
        layers are causal.
        """
        is_causal = self._files.config.get("is_causal")
        is_causal = self._nested.get("causal") if is_causal is None else is_causal
        usual = is_sliding and not self._options.get("sliding_window_non_causal")
        window = self._size("sliding_window", self._options.get("swa_window_size")) if is_sliding else None
        return DFlashLayerKind(usual if is_causal is None else bool(is_causal), window)

    def _mask_token(self, vocabulary: int) -> int:
        name = next((name for name in MASK_KEYS if self._options.get(name) is not None), MASK_KEYS[0])
        token = self._options.get(name)
        is_added = (self._files.folder / MASK_FILE).is_file()  # its embedding is not in the target's table
        if not isinstance(token, int) or token < 0 or not (token < vocabulary or is_added):
            raise self._wrong(
                name,
                f"expected the mask token's id, below {vocabulary} unless {MASK_FILE} has its embedding; correct it, or"
                " fetch the whole head",
            )
        return token

    def _columns(self, vocabulary: int) -> int:
        columns = self._size("draft_vocab_size", vocabulary)
        missing = [name for name in ("d2t", "lm_head.weight") if name not in self._files.tensors]
        if columns > vocabulary or (columns < vocabulary and missing):
            raise self._wrong(
                "draft_vocab_size",
                f"expected at most {vocabulary}, and less only with the tensors d2t and lm_head.weight; fetch the head"
                " again",
            )
        return columns

    def _needs(self) -> StatesNeeded:
        hidden = self._target.hidden
        width = int(self._files.tensor("fc.weight").shape[-1])
        states = self._states(width // hidden)
        if len(states) * hidden != width or not all(0 <= k <= self._target.layers for k in states):
            raise ModelError(
                f"{self._files.folder} reads the target's states {list(states)}, but its fc.weight has {width} inputs"
                f" and the target states 0 to {self._target.layers} of {hidden}; expected {width / hidden:g} of these,"
                " so use a head made for this target"
            )
        return StatesNeeded(states, width, hidden, sees=self._sees())

    def _sees(self) -> int | None:
        """Returns the number of positions, up to and including the anchor, that the head reads; None if unlimited.

        Later positions of the block do not extend this range.
        """
        layers = self._layers()
        windows = [kind.window for kind in layers if kind.window is not None]
        return max(windows) if len(windows) == len(layers) else None

    def _states(self, count: int) -> tuple[int, ...]:
        """Returns the indices of the states to read, in the order of the projection."""
        keys = STATES_KEYS if "speculators_model_type" in self._files.config else (OUTPUTS_KEY, *STATES_KEYS)
        for name in (*keys, OUTPUTS_KEY):
            ids = self._options.get(name)
            if ids is None:
                continue
            if not isinstance(ids, list) or not all(isinstance(k, int) for k in ids):
                raise self._wrong(name, "expected a list of whole numbers; correct it")
            return tuple(k + 1 if name == OUTPUTS_KEY else k for k in ids)
        return tuple(k + 1 for k in default_outputs(self._target.layers, count))


def default_outputs(layers: int, count: int) -> list[int]:
    """Returns the default layers whose outputs are read, evenly spaced from layer 1 to the third-last layer."""
    if count == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
