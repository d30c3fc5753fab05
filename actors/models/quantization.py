"""Refuses quantised checkpoints that transformers does not know or that need a library that is not installed."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

from actors.models.config_reader import CONFIG, one_line
from cluster.errors import ModelError


def quantization_method(folder: Path, config: PretrainedConfig) -> str:
    """Returns the method that a checkpoint is quantised with, or nothing. Raises ModelError for an unknown one."""
    section = _section(config)
    if not section:
        return ""
    method = section.get("quant_method", "no quant_method")
    if section.get("load_in_4bit") or section.get("load_in_8bit"):
        method = "bitsandbytes_4bit" if section.get("load_in_4bit") else "bitsandbytes_8bit"
    method = str(getattr(method, "value", method))
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ModelError(
            f"{folder} is quantised with '{method}' (quant_method), which transformers {transformers.__version__} does"
            f" not know; use the unquantised checkpoint, or remove quantization_config from {CONFIG} if its weights are"
            " plain"
        )
    return method


def check_quantization(folder: Path, config: PretrainedConfig) -> None:
    """Raises ModelError when a checkpoint is quantised by a method that cannot be loaded with what is installed."""
    method = quantization_method(folder, config)
    if not method:
        return
    try:
        with suppress(RuntimeError):  # of a missing GPU, which the node that loads the model may have
            AutoHfQuantizer.from_config(_section(config), pre_quantized=True).validate_environment(device_map=None)
    except (ImportError, ValueError, TypeError) as error:
        raise ModelError(
            f"{folder} is quantised with '{method}', which cannot be loaded here: {one_line(error)}; or use the"
            " unquantised checkpoint"
        ) from error


def _section(config: PretrainedConfig) -> dict[str, Any]:
    for part in (config, config.get_text_config()):
        if section := getattr(part, "quantization_config", None):
            return dict(section if isinstance(section, dict) else section.to_dict())
    return {}
