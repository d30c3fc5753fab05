"""Tensors that a head's folder must or may hold, with their shapes: the loader's requirements as data."""

from dataclasses import dataclass, field

from actors.drafters.heads.dflash.config import DFlashConfig
from actors.drafters.heads.eagle.config import EagleConfig, EagleKind, FeatureNorm, OutputNorm, WeightSource
from actors.drafters.heads.files import HeadFiles
from actors.drafters.heads.last_state.medusa import MedusaConfig
from actors.drafters.heads.last_state.mlp_speculator import MlpSpeculatorConfig

Shape = tuple[int, ...]
MASK_STATE = "mask_hidden"  # P-EAGLE: one row, saved with any number of dimensions of size 1


@dataclass(slots=True)
class ExpectedTensors:
    """Shapes by tensor name. A bias is allowed with each linear weight."""

    needed: dict[str, Shape] = field(default_factory=dict)
    allowed: dict[str, Shape] = field(default_factory=dict)
    is_closed: bool = True  # True if any further tensor is a misfit

    def linear(self, name: str, outputs: int, inputs: int) -> None:
        self.needed[f"{name}.weight"] = (outputs, inputs)
        self.allowed[f"{name}.bias"] = (outputs,)

    def norm(self, name: str, size: int, *, is_needed: bool = True) -> None:
        (self.needed if is_needed else self.allowed)[f"{name}.weight"] = (size,)

    def either(self, is_needed: bool, name: str, shape: Shape) -> None:
        """Expects a tensor if it is needed; otherwise it is borrowed from elsewhere."""
        if is_needed:
            self.needed[name] = shape


def expected_tensors(
    files: HeadFiles, config: EagleConfig | DFlashConfig | MedusaConfig | MlpSpeculatorConfig
) -> ExpectedTensors:
    """Returns the expected tensors of a head in canonical names that was resolved to `config`."""
    if isinstance(config, EagleConfig):
        return _of_eagle(config, files)
    if isinstance(config, DFlashConfig):
        return _of_dflash(config, files)
    return _of_medusa(config, files) if isinstance(config, MedusaConfig) else _of_mlp_speculator(config)


def _of_eagle(config: EagleConfig, files: HeadFiles) -> ExpectedTensors:
    found = ExpectedTensors()
    is_eagle3 = config.kind is EagleKind.EAGLE3
    hidden = config.hidden
    if config.projects or not is_eagle3:
        found.linear("fc", hidden, config.needs.width if is_eagle3 else 2 * hidden)
    _feature_norms(found, config)
    if config.kind is EagleKind.MTP:
        found.norm("state_layernorm", hidden, is_needed=False)
    for index in range(config.layers):
        is_wide = is_eagle3 and index == 0
        found.norm(f"layers.{index}.input_layernorm", hidden, is_needed=is_wide or index > 0)
        _decoder_layer(found, config, index, (2 if is_wide else 1) * hidden)
        if f"layers.{index}.self_attn.q_norm.weight" in files.tensors:
            _head_norms(found, config, index)
    if is_eagle3:
        found.norm("layers.0.hidden_norm", hidden, is_needed=False)
    else:
        found.norm("embed_layernorm", hidden, is_needed=False)
    last = "norm" if is_eagle3 else "lm_head_layernorm"
    found.norm(last, hidden, is_needed=config.output_norm is not OutputNorm.NOTHING)
    found.either(config.embedding is WeightSource.HEAD, "embed_tokens.weight", (config.vocabulary, hidden))
    found.either(config.lm_head is WeightSource.HEAD, "lm_head.weight", (config.columns, hidden))
    found.either(config.columns < config.vocabulary, "d2t", (config.columns,))
    found.either(config.mask_token is not None, MASK_STATE, (config.needs.width,))
    found.allowed["d2t"] = (config.columns,)
    return found


def _feature_norms(found: ExpectedTensors, config: EagleConfig) -> None:
    if config.feature_norm is FeatureNorm.ALL:
        found.norm("input_norm", config.needs.width)
    elif config.feature_norm is FeatureNorm.EACH:
        for part in range(config.needs.width // config.target_hidden):
            found.norm(f"fc_norm.{part}", config.target_hidden)


def _of_dflash(config: DFlashConfig, files: HeadFiles) -> ExpectedTensors:
    found = ExpectedTensors()
    hidden = config.hidden
    found.linear("fc", hidden, config.needs.width)
    found.norm("hidden_norm", hidden)
    found.norm("norm", hidden)
    for index in range(len(config.layers)):
        found.norm(f"layers.{index}.input_layernorm", hidden)
        _decoder_layer(found, config, index, hidden)
        _head_norms(found, config, index)
    found.either("embed_tokens.weight" in files.tensors, "embed_tokens.weight", (config.vocabulary, hidden))
    found.either("lm_head.weight" in files.tensors, "lm_head.weight", (config.columns, hidden))
    found.allowed["d2t"] = (config.columns,)
    return found


def _decoder_layer(found: ExpectedTensors, config: EagleConfig | DFlashConfig, index: int, inputs: int) -> None:
    layer = f"layers.{index}"
    queries = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
        found.linear(f"{layer}.self_attn.{name}_proj", outputs, inputs)
    found.linear(f"{layer}.self_attn.o_proj", config.hidden, queries)
    found.norm(f"{layer}.post_attention_layernorm", config.hidden)
    found.linear(f"{layer}.mlp.gate_proj", config.intermediate, config.hidden)
    found.linear(f"{layer}.mlp.up_proj", config.intermediate, config.hidden)
    found.linear(f"{layer}.mlp.down_proj", config.hidden, config.intermediate)


def _head_norms(found: ExpectedTensors, config: EagleConfig | DFlashConfig, index: int) -> None:
    """Expects both norms; heads have both or neither."""
    for name in ("q_norm", "k_norm"):
        found.norm(f"layers.{index}.self_attn.{name}", config.head_dim)


def _of_medusa(config: MedusaConfig, files: HeadFiles) -> ExpectedTensors:
    """Allows for FasterDecoding's layout, where the blocks of a head may be one module, saved once."""
    found = ExpectedTensors(is_closed=False)
    is_vllm = any(name.startswith("blocks.") for name in files.tensors)
    for head in range(config.heads):
        for block in range(config.blocks):
            name = f"blocks.{head}.layers.{block}" if is_vllm else f"{head}.{block}.linear"
            if is_vllm or block == 0 or f"{name}.weight" in files.tensors:
                found.linear(name, config.hidden, config.hidden)
        last = f"lm_heads.{head}" if is_vllm else f"{head}.{config.blocks}"
        found.either(not files.config.get("original_lm_head"), f"{last}.weight", (config.columns, config.hidden))
    found.allowed["token_map"] = (config.columns,)
    return found


def _of_mlp_speculator(config: MlpSpeculatorConfig) -> ExpectedTensors:
    found = ExpectedTensors(is_closed=False)
    own = range(1 if config.is_tied else config.steps)
    for step in own:
        found.needed[f"emb.{step}.weight"] = (config.columns, config.inner)
        found.needed[f"head.{step}.weight"] = (config.columns, config.inner)
        found.needed[f"ln.{step}.weight"] = (config.inner,)
        found.needed[f"ln.{step}.bias"] = (config.inner,)
    for step in range(min(2, config.steps) if config.is_tied else config.steps):
        found.needed[f"proj.{step}.weight"] = (config.inner, config.hidden if step == 0 else config.inner)
    return found
