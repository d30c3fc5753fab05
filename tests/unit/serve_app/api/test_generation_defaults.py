"""Requests without sampling parameters use the checkpoint's defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ConfigError
from serve_app.api.request_schemas import CompletionRequest
from serve_app.api.validation import NO_DEFAULTS, GenerationDefaults, load_defaults


def a_checkpoint(folder: Path, **known: Any) -> str:
    (folder / "generation_config.json").write_text(json.dumps(known))
    return str(folder)


def test_defaults_are_read_from_the_checkpoint(tmp_path: Path) -> None:
    folder = a_checkpoint(tmp_path, eos_token_id=2, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    assert load_defaults(folder) == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)


def test_a_checkpoint_without_defaults_has_none(tmp_path: Path) -> None:
    assert load_defaults(str(tmp_path)) == NO_DEFAULTS
    assert load_defaults(a_checkpoint(tmp_path, eos_token_id=2)) == NO_DEFAULTS


def test_an_invalid_default_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set server"):
        load_defaults(a_checkpoint(tmp_path, repetition_penalty=1e9))


def test_defaults_fill_only_missing_fields() -> None:
    asked = CompletionRequest.model_validate({"model": "toy", "prompt": "x", "temperature": 1.0, "top_p": None})
    request = GenerationDefaults(temperature=0.6, top_p=0.9, repetition_penalty=1.1).applied(asked)
    assert (request.temperature, request.top_p, request.repetition_penalty, request.min_p) == (1.0, 0.9, 1.1, 0.0)
    assert NO_DEFAULTS.applied(asked) is asked
