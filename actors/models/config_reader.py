"""Reads a checkpoint's config.json. Only this module calls AutoConfig, so that every error is a single line with a fix.

Refuses quantization methods that transformers does not support or whose library is not installed.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

from cluster.errors import ModelError

CONFIG = "config.json"
RECURRENT = frozenset({"linear_attention", "conv", "hybrid"})  # layer types with a recurrent state
ADAPTER = "adapter_config.json"  # written by peft
PLAIN_ROPE = frozenset({"default", "axial"})  # RoPE types besides those in ROPE_INIT_FUNCTIONS
MODES = ("vision_config", "audio_config")


def read_config(folder: Path) -> PretrainedConfig:
    """Returns a causal language model's configuration. Raises ModelError for any other folder."""
    folder = Path(folder)
    _check_has_config(folder)
    raw = read_json(folder / CONFIG)
    _check_model_type(folder, raw)
    check_rope_sections(folder, raw)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        config.get_text_config()  # raises if a model has several text configurations
    except Exception as error:  # config classes validate values in different ways
        raise ModelError(
            f"{folder / CONFIG} is no valid {raw['model_type']} configuration: {one_line(error)};"
            " correct it, or fetch the checkpoint again"
        ) from error
    _check_is_causal(folder, config)
    _check_rope(folder, config)
    return config


def check_rope_sections(folder: Path, raw: Mapping[str, Any]) -> None:
    """Raises ModelError if transformers would replace the RoPE base of `rope_parameters`.

    `rope_scaling`, if present, replaces the whole of `rope_parameters`; without a base of its own, it gets the one
    beside it, or the class's default.
    """
    text = raw.get("text_config")
    for section in (raw, text if isinstance(text, dict) else {}):
        parameters = section.get("rope_parameters")
        scaling = section.get("rope_scaling")
        if not parameters or not scaling or not isinstance(parameters, dict) or not isinstance(scaling, dict):
            continue
        stated = _rope_bases(parameters)
        kind = section.get("model_type", raw.get("model_type"))
        used = _rope_bases(scaling) or {section.get("rope_theta", _default_base(kind))}
        if stated - used:
            raise ModelError(
                f"{folder / CONFIG} has rope_parameters and rope_scaling, so transformers would ignore the rope_theta"
                f" {min(stated - used)} of rope_parameters; move rope_scaling's keys into rope_parameters"
            )


def _default_base(model_type: object) -> float:
    """Returns the RoPE base of an architecture whose configuration states none."""
    config = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING_NAMES else RotaryEmbeddingConfigMixin
    return float(getattr(config, "default_theta", RotaryEmbeddingConfigMixin.default_theta))


def _rope_bases(rope: Mapping[str, Any]) -> set[float]:
    """Returns the bases in a RoPE section, which may have one section per layer type."""
    by_layer = [value for value in rope.values() if isinstance(value, dict)]
    return {part["rope_theta"] for part in (by_layer or [dict(rope)]) if part.get("rope_theta") is not None}


def embedding_rows(folder: Path) -> int | None:
    """Returns the number of embedding rows; None if transformers does not implement the architecture.

    Prefers the number in config.json, so that architectures implemented only by another engine work.
    """
    _check_has_config(Path(folder))
    raw = read_json(Path(folder) / CONFIG)
    text = raw.get("text_config")
    for section in (text if isinstance(text, dict) else {}, raw):
        if isinstance(rows := section.get("vocab_size"), int):
            return rows
    if raw.get("model_type") not in CONFIG_MAPPING_NAMES:
        return None
    return int(read_config(folder).get_text_config().vocab_size)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a checkpoint's file. Raises ModelError for any other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"cannot read {path}: {one_line(error)}; fetch the checkpoint again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__} instead of an object; fetch it again")
    return content


def one_line(error: object) -> str:
    """Shortens another library's error message to one line without a final full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= 300 else f"{text[:297]}...").removesuffix(".")


def _check_has_config(folder: Path) -> None:
    has_config = (folder / CONFIG).is_file()
    if (folder / ADAPTER).is_file():
        what = "a LoRA adapter beside a model" if has_config else "a LoRA adapter, not a model"
        raise ModelError(
            f"{folder} holds {what} ({ADAPTER}), and adapters are not applied; merge it into its base model with peft's"
            " merge_and_unload() and save_pretrained(), and serve the merged folder"
        )
    if has_config:
        return
    if any(folder.glob("*.gguf")):
        raise ModelError(
            f"{folder} has no {CONFIG}, only GGUF files, which are not read; load them with transformers"
            " (from_pretrained(..., gguf_file=...)) and write a folder with save_pretrained()"
        )
    raise ModelError(
        f"{folder} has no {CONFIG}, so it holds no model in Hugging Face format; fetch the whole checkpoint, or write"
        " the model with save_pretrained()"
    )


def _check_model_type(folder: Path, raw: dict[str, Any]) -> None:
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(
            f"{folder / CONFIG} names no model_type; add the architecture's, such as"
            ' "model_type": "llama", or fetch the original file'
        )
    if kind in CONFIG_MAPPING_NAMES:
        return
    if raw.get("auto_map"):
        raise ModelError(
            f"{folder} needs Python code of its own (auto_map in {CONFIG}, model_type '{kind}'), which is not run"
            f" here; use a version of the model whose model_type transformers {transformers.__version__} implements"
        )
    raise ModelError(
        f"{folder / CONFIG} has model_type '{kind}', which transformers {transformers.__version__} does not implement;"
        " correct the name, or use a checkpoint of an architecture that it implements"
    )


def _check_is_causal(folder: Path, config: PretrainedConfig) -> None:
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if config.is_encoder_decoder:
        what = "an encoder-decoder model"
    elif any(hasattr(config, mode) for mode in MODES):
        what = "a multimodal model without a text-only class"
    else:
        what = "no language model that continues a text"
    raise ModelError(
        f"{folder} holds {what} (model_type '{config.model_type}'); only decoder-only causal language models are"
        " served, so use one of these"
    )


def _check_rope(folder: Path, config: PretrainedConfig) -> None:
    """Raises ModelError for an unsupported RoPE scaling; building the model would fail later."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in by_layer or [parameters]:
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_INIT_FUNCTIONS and kind not in PLAIN_ROPE:
            supported = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
            raise ModelError(
                f"{folder / CONFIG} has rope_type '{kind}', which transformers {transformers.__version__} does not"
                f" implement; expected one of {supported}"
            )


def is_recurrent(config: PretrainedConfig) -> bool:
    """Returns whether a model has layers with a recurrent state (linear attention, Mamba, convolutions)."""
    return not RECURRENT.isdisjoint(getattr(config.get_text_config(), "layer_types", None) or ())


def quantization_method(folder: Path, config: PretrainedConfig) -> str:
    """Returns the checkpoint's quantization method; empty if unquantized. Raises ModelError for an unknown method."""
    section = _section(config)
    if not section:
        return ""
    method = section.get("quant_method", "no quant_method")
    if section.get("load_in_4bit") or section.get("load_in_8bit"):
        method = "bitsandbytes_4bit" if section.get("load_in_4bit") else "bitsandbytes_8bit"
    method = str(getattr(method, "value", method))
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelError(
            f"{folder} is quantized with '{method}' (quant_method), which transformers {transformers.__version__} does"
            f" not know; use the unquantized checkpoint, or remove quantization_config from {CONFIG} if its weights are"
            " plain"
        )
    return method


def check_quantization(folder: Path, config: PretrainedConfig) -> None:
    """Raises ModelError if the installed libraries do not support the checkpoint's quantization method."""
    method = quantization_method(folder, config)
    if not method:
        return
    try:
        with suppress(RuntimeError):  # a GPU may exist only on the node that loads the model
            AutoHfQuantizer.from_config(_section(config), pre_quantized=True).validate_environment(device_map=None)
    except (ImportError, ValueError, TypeError) as error:
        raise ModelError(
            f"{folder} is quantized with '{method}', which cannot be loaded here: {one_line(error)}; or use the"
            " unquantized checkpoint, or target.engine: vllm for a target"
        ) from error


def _section(config: PretrainedConfig) -> dict[str, Any]:
    for part in (config, config.get_text_config()):
        if section := getattr(part, "quantization_config", None):
            return dict(section if isinstance(section, dict) else section.to_dict())
    return {}
