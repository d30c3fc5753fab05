"""Computes logits of a ragged batch: any Hugging Face model in its own code, Llama-like models in leaner code.

In a small step, a model spends half of its time outside matrix products, in modules, casts and copies. Llama-like
models (pre-norm, rotary positions, gated MLP) share one structure, implemented here with few, large operations over
packed weights.

Transformers selects rotary frequencies by the longest sequence in a forward. Here, texts of all lengths share a
forward, and cached keys keep their rotation. Therefore, `fix_frequencies` selects frequencies once, at load.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.mistral.modeling_mistral import MistralAttention

from actors.attention import ScoreOptions
from actors.attention.batch import RaggedBatch
from actors.attention.hugging_face import ATTENTION_NAME, register_attention, share_batch
from actors.compute.collectives import Shard, SingleRank
from actors.compute.linear import Product, Projection, SharedProjection, pack_linears, projection, trim_heap
from actors.models import fused
from actors.models.capture_check import capture_fault
from actors.models.fused import Compile, FusedFunctions, HeadNorms
from actors.models.merged_weights import join_rows, release
from actors.models.own_attention import replace_attention
from actors.models.recurrent_layers import run_row_by_row
from actors.models.sharding import RowParallelLinear, VocabularyParallelHead
from cluster.errors import ModelError

log = logging.getLogger(__name__)


class ForwardOutput(NamedTuple):
    """Outputs of a forward at the requested positions, in order."""

    logits: Tensor  # (positions, columns); no columns if `Draws.needs_logits` is False and the runner draws
    hidden: Tensor | None  # (positions, hidden): inputs of the LM head; None if not exposed by the model's code
    streams: Tensor | None = None  # (tokens, layers x hidden), if layers were requested
    drawn: Tensor | None = None  # (positions, 2): token drawn, and 1 if the draws lead here (`mark_reached`)

    def first(self, tokens: int, positions: int) -> "ForwardOutput":
        """Returns the outputs of the first tokens and positions, without those of padding."""
        return ForwardOutput(
            logits=self.logits[:positions],
            hidden=None if self.hidden is None else self.hidden[:positions],
            streams=None if self.streams is None else self.streams[:tokens],
            drawn=None if self.drawn is None else self.drawn[:positions],
        )


LONGROPE = "longrope"
DYNAMIC = "dynamic"
STATIC = "default"  # RoPE type with constant frequencies


def check_positions(config: PretrainedConfig, context: int | None) -> None:
    """Raises ModelError if texts of up to `context` tokens need varying frequencies."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    by_layer = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    if context is None or not any(DYNAMIC in str(part.get("rope_type")) for part in by_layer):
        return
    if context > text.max_position_embeddings:
        raise ModelError(
            f"RoPE scaling 'dynamic' changes with the text's length beyond {text.max_position_embeddings} tokens,"
            f" but sessions may have {context}; set model.max_context to {text.max_position_embeddings} or less"
        )


def fix_frequencies(model: nn.Module, context: int | None = None) -> None:
    """Makes every rotary module of a model static, for texts of up to `context` tokens.

    With `longrope`, a context beyond the original length selects the long factors, even for short texts. Without a
    context, the short factors are used. `dynamic` frequencies are constant within the model's own positions
    (`check_positions`). Static modules stay unchanged.
    """
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fixed(module, kinds, None, context)
        elif isinstance(kinds, dict):
            module.rope_type = {layer: _fixed(module, kind, layer, context) for layer, kind in kinds.items()}


def _fixed(module: Any, kind: str, layer_type: str | None, context: int | None) -> str:
    """Sets the frequencies for one layer type; returns the module's new RoPE type."""
    if DYNAMIC in kind:
        return STATIC
    if kind != LONGROPE:
        return kind
    config = module.config
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    original = int(parameters["original_max_position_embeddings"])
    if context is not None and context > original:
        frequencies = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
        long, _ = ROPE_INIT_FUNCTIONS[kind](config, frequencies.device, seq_len=original + 1, layer_type=layer_type)
        frequencies.copy_(long)
    return STATIC


KNOWN_LINEARS = frozenset(
    {nn.Linear, RowParallelLinear, VocabularyParallelHead}
)  # excludes quantized layers and adapters
LLAMA_KIND = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


class Decoder(Protocol):
    """Computes this rank's columns of the logits, `shard`, at the batch's requested positions.

    With ascending `layers`, also returns the residual streams of all tokens at these layers. Layers are numbered as in
    `output_hidden_states`; the last stream follows the final norm.
    """

    @property
    def shard(self) -> Shard: ...

    def capture_fault(self, numbers: Sequence[int]) -> str:
        """Returns why steps with these numbers of tokens cannot be captured; empty if they can."""
        ...

    def __call__(self, batch: RaggedBatch, layers: tuple[int, ...] = ()) -> ForwardOutput: ...


class ModelDecoder:
    """Runs the model's own code with the registered `paged_attention`.

    Tensor-parallel ranks gather whole logits in the LM head, since the model's code may go on to modify them.
    """

    def __init__(self, model: PreTrainedModel, product: Product = projection) -> None:
        register_attention()
        if not replace_attention(model):
            model.set_attn_implementation(ATTENTION_NAME)
        pack_linears(model, product)
        self.shard = Shard(SingleRank(), int(model.config.get_text_config().vocab_size))
        self._model = model
        self._slot = share_batch(model)
        run_row_by_row(model, self._slot)

    def capture_fault(self, numbers: Sequence[int]) -> str:
        """Implements `Decoder`."""
        return capture_fault(self._model, self, numbers)

    def __call__(self, batch: RaggedBatch, layers: tuple[int, ...] = ()) -> ForwardOutput:
        with self._slot.hold(batch):
            output = self._model(
                input_ids=batch.tokens.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.logit_at,
                **({"output_hidden_states": True} if layers else {}),
            )
        streams = torch.cat([output.hidden_states[layer][0] for layer in layers], dim=-1) if layers else None
        return ForwardOutput(output.logits[0], None, streams)


class Norm(Protocol):
    """Root mean square norm over the last dimension, computed in float32."""

    def __call__(self, x: Tensor) -> Tensor: ...


class WeightedNorm(Norm, Protocol):
    """A norm that fused functions can compute from its weight, (size,), and eps."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


@dataclass(frozen=True, slots=True)
class PlainNorm:
    """Norm by torch's RMS norm, a single operation on a GPU."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class MirroredNorm:
    """Norm by layer norm, a single operation on a CPU, where torch's RMS norm takes ten.

    The row [x, -x] has mean 0 and the same mean square as x, so the first half of its layer norm is the RMS norm of x.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._size = len(weight)
        self._weights = torch.cat([weight, weight])

    def __call__(self, x: Tensor) -> Tensor:
        mirrored = torch.cat((x, x.neg()), -1)
        return F.layer_norm(mirrored, (2 * self._size,), self._weights, None, self.eps).narrow(-1, 0, self._size)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer."""

    attention_norm: Norm
    qkv: Projection  # yields concatenated queries, keys and values
    query_norm: WeightedNorm | None
    key_norm: WeightedNorm | None
    attention_out: Projection
    mlp_norm: WeightedNorm
    gate_up: Projection  # yields the gate, then the up projection
    down: Projection
    scores: ScoreOptions

    @property
    def head_norms(self) -> HeadNorms | None:
        if self.query_norm is None or self.key_norm is None:
            return None
        return HeadNorms(self.query_norm.weight, self.key_norm.weight, self.query_norm.eps)


class Rotation(NamedTuple):
    """Rotary factors of every token, (total, 1, head dim), for x cos + roll(x) sin; `sin` includes the sign of
    rotate_half.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Attention of one layer, for all heads of this rank."""

    queries: int
    keys: int
    dim: int

    def attend(self, layer: Layer, index: int, inputs: Tensor, rotation: Rotation, batch: RaggedBatch) -> Tensor:
        """Returns attention over normed `inputs`, which may end with padding rows: (total, heads x head dim)."""
        rotated = self.queries + self.keys
        qkv = layer.qkv(inputs).view(len(inputs), rotated + self.keys, self.dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            qkv[:, : self.queries] = layer.query_norm(qkv[:, : self.queries])
            qkv[:, self.queries : rotated] = layer.key_norm(qkv[:, self.queries : rotated])
        turning = qkv[:, :rotated]
        torch.addcmul(turning * rotation.cos, turning.roll(self.dim // 2, -1), rotation.sin, out=turning)
        total = len(batch.tokens)
        query = qkv[:total, : self.queries]
        key_value = qkv[:total, self.queries :]
        return batch.attend(index, query, key_value, layer.scores)


class LayerOperations(Protocol):
    """The operations between a layer's products."""

    def attend(self, layer: Layer, index: int, inputs: Tensor, rotation: Rotation, batch: RaggedBatch) -> Tensor:
        """Returns attention over normed `inputs`, which may end with padding rows: (total, heads x head dim)."""
        ...

    def add_norm(self, product: Projection, x: Tensor, residual: Tensor, norm: WeightedNorm) -> tuple[Tensor, Tensor]:
        """Returns product(x) + residual, and its norm."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """Returns SiLU(gate) x up."""
        ...


@dataclass(frozen=True, slots=True)
class PlainOperations:
    """Runs one operation at a time. A CPU adds the residual within the product."""

    heads: AttentionHeads

    def attend(self, layer: Layer, index: int, inputs: Tensor, rotation: Rotation, batch: RaggedBatch) -> Tensor:
        return self.heads.attend(layer, index, inputs, rotation, batch)

    def add_norm(self, product: Projection, x: Tensor, residual: Tensor, norm: WeightedNorm) -> tuple[Tensor, Tensor]:
        total = product.plus(x, residual)
        return total, norm(total)

    def gate(self, gate_up: Tensor) -> Tensor:
        return fused.gate(gate_up)


@dataclass(frozen=True, slots=True)
class FusedOperations:
    """Runs compiled functions. Does not support padding rows."""

    functions: FusedFunctions

    def attend(self, layer: Layer, index: int, inputs: Tensor, rotation: Rotation, batch: RaggedBatch) -> Tensor:
        pool = batch.open_layer(index)
        query = self.functions.rotate_and_cache(layer.qkv(inputs), *rotation, layer.head_norms, pool, batch.written)
        return batch.attend_cached(query, pool, layer.scores)

    def add_norm(self, product: Projection, x: Tensor, residual: Tensor, norm: WeightedNorm) -> tuple[Tensor, Tensor]:
        return self.functions.add_norm(product(x), residual, norm.weight, norm.eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        return self.functions.gate(gate_up)


MANY = 8  # any number of tokens but 1, which is compiled separately


def fused_operations(
    compile_function: Compile, heads: AttentionHeads, layer: Layer, rotate: "RotationTable", embedding: Tensor
) -> FusedOperations:
    """Compiles the functions for a model's sizes: for any number of tokens, and for a single one.

    Raises RuntimeError where they cannot be compiled, as without Triton or a C compiler.
    """
    functions = FusedFunctions.of(compile_function)
    pool = embedding.new_zeros(MANY, 2 * heads.keys, heads.dim)
    norm = layer.mlp_norm
    with torch.inference_mode():
        for tokens in (MANY, 1):
            x, residual = (embedding.new_zeros(tokens, embedding.shape[1]) for _ in range(2))
            slots = torch.arange(tokens, device=x.device)
            qkv, gate_up, rotation = layer.qkv(x), layer.gate_up(x), rotate(slots)
            by_token = (x, residual, slots, qkv, gate_up, *rotation) if tokens > 1 else ()
            for part in (pool, *by_token):
                torch._dynamo.mark_dynamic(part, 0)
            functions.add_norm(x, residual, norm.weight, norm.eps)
            functions.rotate_and_cache(qkv, *rotation, layer.head_norms, pool, slots)
            functions.gate(gate_up)
    return FusedOperations(functions)


def gated_mlp(layer: Layer, hidden: Tensor) -> Tensor:
    """Computes a layer's MLP, including norm and residual."""
    return layer.down.plus(fused.gate(layer.gate_up(layer.mlp_norm(hidden))), hidden)


def rotation_of(rotary: nn.Module, like: Tensor, positions: Tensor) -> Rotation:
    """Computes the rotary factors at positions, (total,), with transformers' module, in the dtype of `like`."""
    cos, sin = rotary(like, position_ids=positions.unsqueeze(0))
    cos = cos[0].unsqueeze(1)
    sin = sin[0].unsqueeze(1)
    sin[..., : sin.shape[-1] // 2].neg_()
    return Rotation(cos, sin)


SPARE_POSITIONS = 256


class RotationTable:
    """Rotary factors of all positions, looked up in one operation."""

    @torch.inference_mode()
    def __init__(self, rotary: nn.Module, like: Tensor, positions: int) -> None:
        rotation = rotation_of(rotary, like, torch.arange(positions, device=like.device))
        self._factors = torch.stack(rotation, dim=1)  # (positions, 2, 1, head dim)

    def __call__(self, positions: Tensor) -> Rotation:
        """Returns the factors at positions, (total,)."""
        return Rotation(*self._factors.index_select(0, positions).unbind(1))


class LlamaDecoder:
    """Decoder for Llama, Mistral, Qwen2 and Qwen3, with fewer operations than their own code.

    Takes over the model's weights layer by layer, so that no more than one layer is held twice. The model's own linear
    layers cannot be used afterwards. Positions are below `context`, by default the model's own maximum, or up to
    SPARE_POSITIONS more while costs are measured. `compile_function` fuses the operations between products.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        product: Product = projection,
        context: int | None = None,
        compile_function: Compile | None = None,
    ) -> None:
        body = model.get_decoder()
        first = body.layers[0].self_attn
        dim = int(first.head_dim)
        heads = AttentionHeads(first.q_proj.weight.shape[0] // dim, first.k_proj.weight.shape[0] // dim, dim)
        self._embedding = body.embed_tokens.weight.detach()
        positions = int(model.config.max_position_embeddings) if context is None else context
        self._rotate = RotationTable(body.rotary_emb, self._embedding[:1], positions + SPARE_POSITIONS)
        self._norms = [_norm(module) for module in (*(layer.input_layernorm for layer in body.layers), body.norm)]
        self._layers = [_layer(*parts, product) for parts in zip(body.layers, self._norms[:-1], strict=True)]
        self._least_rows = self._layers[0].qkv.fastest_rows
        head = model.get_output_embeddings()
        is_split = isinstance(head, VocabularyParallelHead)
        self.shard = head.shard if is_split else Shard(SingleRank(), head.out_features)
        self._head = _single_projection(head, product)
        self._operations: LayerOperations = PlainOperations(heads)
        if compile_function is not None:
            try:
                self._operations = fused_operations(
                    compile_function, heads, self._layers[0], self._rotate, self._embedding
                )
            except RuntimeError as error:
                reason = str(error).strip().partition("\n")[0]
                log.warning("torch cannot fuse operations (%s); install Triton and a C compiler for speed", reason)
            else:
                self._least_rows = 1  # fused operations take no padding rows; products pad their own

    def capture_fault(self, numbers: Sequence[int]) -> str:
        """Implements `Decoder`: no operation depends on values."""
        return ""

    def __call__(self, batch: RaggedBatch, layers: tuple[int, ...] = ()) -> ForwardOutput:
        states: list[Tensor] = []
        hidden = self._hidden(batch, layers, states)
        return ForwardOutput(self._head(hidden), hidden, torch.cat(states, dim=-1) if layers else None)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds tokens: (tokens,) -> (tokens, hidden)."""
        return F.embedding(tokens, self._embedding)

    def _hidden(self, batch: RaggedBatch, layers: tuple[int, ...], states: list[Tensor]) -> Tensor:
        """Returns the LM head's inputs at the batch's requested positions, (positions, hidden).

        Appends the streams at `layers` to `states`, each (tokens, hidden).
        """
        total = len(batch.tokens)
        padding = max(0, self._least_rows - total)
        tokens, positions = batch.tokens, batch.positions
        if padding:
            tokens, positions = (F.pad(part, (0, padding)) for part in (tokens, positions))
        hidden = self.embed(tokens)
        rotation = self._rotate(positions)
        operations = self._operations
        normed = self._norms[0](hidden)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._norms[1:], strict=True)):
            if index in layers:
                states.append(hidden[:total])
            attended = operations.attend(layer, index, normed, rotation, batch)
            if padding:
                attended = F.pad(attended, (0, 0, 0, padding))
            hidden, normed = operations.add_norm(layer.attention_out, attended, hidden, layer.mlp_norm)
            gated = operations.gate(layer.gate_up(normed))
            hidden, normed = operations.add_norm(layer.down, gated, hidden, next_norm)
        if len(self._layers) in layers:
            states.append(normed[:total])
        return normed.index_select(0, batch.logit_at)


def norm_of(weight: Tensor, eps: float) -> WeightedNorm:
    """Returns the fastest norm for the weight's device."""
    kind = MirroredNorm if weight.device.type == "cpu" else PlainNorm
    return kind(weight, eps)


def _norm(module: Any) -> WeightedNorm:
    return norm_of(module.weight.detach(), module.variance_epsilon)


def _layer(module: Any, attention_norm: Norm, product: Product) -> Layer:
    attention = module.self_attn
    mlp = module.mlp
    return Layer(
        attention_norm=attention_norm,
        qkv=_combined_projection(product, attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        attention_out=_single_projection(attention.o_proj, product),
        mlp_norm=_norm(module.post_attention_layernorm),
        gate_up=_combined_projection(product, mlp.gate_proj, mlp.up_proj),
        down=_single_projection(mlp.down_proj, product),
        scores=ScoreOptions(attention.scaling, _window(attention)),
    )


def _window(attention: Any) -> int | None:
    """Returns a layer's window: per layer in Qwen, per model in Mistral, None in Llama."""
    source = attention.config if type(attention) is MistralAttention else attention
    window: int | None = getattr(source, "sliding_window", None)
    return window


def _combined_projection(product: Product, *linears: nn.Linear) -> Projection:
    """Fuses linear layers with the same input into one product; releases their weights."""
    weight = join_rows([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "either all or none of these layers must have a bias"
    whole = product(weight, torch.cat(biases) if biases else None)
    for linear in linears:
        release(linear)
    trim_heap()
    return whole


def _single_projection(linear: nn.Linear, product: Product) -> Projection:
    """Returns one layer's product, and releases its weight; sums the ranks' parts if the inputs are split."""
    whole = product(linear.weight, None if isinstance(linear, RowParallelLinear) else linear.bias)
    release(linear)
    trim_heap()
    return SharedProjection(whole, linear.reduce) if isinstance(linear, RowParallelLinear) else whole


def is_llama_kind(model: PreTrainedModel) -> bool:
    """Returns whether `LlamaDecoder` is equivalent to this model's own code."""
    config = model.config
    return (
        type(model).__name__ in LLAMA_KIND
        and config.hidden_act == "silu"
        and not getattr(config, "quantization_config", None)
        and all(type(module) in KNOWN_LINEARS for module in model.modules() if isinstance(module, nn.Linear))
        and isinstance(model.get_output_embeddings(), nn.Linear)
    )


def decoder_for(
    model: PreTrainedModel,
    product: Product = projection,
    context: int | None = None,
    compile_function: Compile = torch.compile,
) -> Decoder:
    """Returns the fastest decoder for a model, for texts of up to `context` tokens; takes over the model's weights.

    `compile_function` fuses operations on GPUs; CPUs would gain nothing.
    """
    fix_frequencies(model, context)
    if not is_llama_kind(model):
        return ModelDecoder(model, product)
    fuses = model.get_input_embeddings().weight.device.type == "cuda"
    return LlamaDecoder(model, product, context, compile_function if fuses else None)
