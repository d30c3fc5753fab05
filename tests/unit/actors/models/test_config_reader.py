"""Every unsupported config.json is refused in one line with a remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from actors.models.config_reader import check_rope_sections, embedding_rows, read_config
from cluster.errors import ModelError

LLAMA = {"model_type": "llama"}
CODE = {"auto_map": {"AutoConfig": "configuration_new.NewConfig"}}


def a_folder(folder: Path, config: Any, **files: str) -> Path:
    """Writes config.json (text verbatim), and other JSON files by name without extension."""
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content)
    return folder


def refusal_of(folder: Path) -> str:
    with pytest.raises(ModelError) as refused:
        read_config(folder)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 600
    assert str(folder) in message
    return message


@pytest.mark.parametrize(
    ("config", "problem", "remedy"),
    [
        (None, "has no config.json", "fetch the whole checkpoint"),
        ("{", "cannot read .*config.json", "fetch"),
        ("[]", "a JSON list instead of an object", "fetch"),
        ({}, "names no model_type", "add the architecture's"),
        ({"model_type": None}, "names no model_type", "add the architecture's"),
        ({"model_type": "new"}, "model_type 'new', which transformers 5", "correct the name"),
        ({"model_type": "new", **CODE}, "needs Python code of its own", "use a version of the model whose"),
        (LLAMA | {"rope_scaling": {"rope_type": "new", "factor": 2.0}}, "rope_type 'new'", "expected one of default, "),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn"}}, "no valid llama configuration: .*factor", "correct it"),
        (LLAMA | {"hidden_size": "wide"}, "no valid llama configuration: .*hidden_size", "correct it"),
        (LLAMA | {"dtype": "float17"}, "no valid llama configuration: .*float17", "correct it"),
        ({"model_type": "t5"}, "an encoder-decoder model", "decoder-only causal language models"),
        ({"model_type": "llava"}, "a multimodal model", "decoder-only causal language models"),
        ({"model_type": "vit"}, "no language model that continues a text", "decoder-only causal language models"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(tmp_path, config, problem, remedy):
    message = refusal_of(a_folder(tmp_path, config))
    assert remedy in message
    with pytest.raises(ModelError, match=problem):
        read_config(tmp_path)


@pytest.mark.parametrize("config", [None, LLAMA], ids=["alone", "beside a model"])
def test_a_lora_adapter_is_to_be_merged(tmp_path, config):
    assert "merge_and_unload()" in refusal_of(a_folder(tmp_path, config, adapter_config="{}"))


def test_gguf_files_are_to_be_converted(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert "save_pretrained()" in refusal_of(tmp_path)


@pytest.mark.parametrize("rope_type", ["llama3", "linear", "dynamic"])
def test_a_config_is_read_with_its_position_scaling(tmp_path, rope_type):
    scaling = {"rope_type": rope_type, "factor": 2.0}
    if rope_type == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    LlamaConfig(vocab_size=7, rope_parameters=scaling).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config.vocab_size == 7
    assert config.rope_parameters["rope_type"] == rope_type


BASE = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"rope_parameters": BASE, "rope_scaling": YARN},
        LLAMA | {"rope_parameters": BASE, "rope_scaling": YARN, "rope_theta": 1e4},
        {"model_type": "gemma3", "text_config": {"rope_parameters": {"full_attention": BASE}, "rope_scaling": YARN}},
    ],
    ids=["no other base", "another base", "by layer type in text_config"],
)
def test_a_base_that_transformers_would_replace_is_refused(tmp_path, config):
    assert "move rope_scaling's keys into rope_parameters" in refusal_of(a_folder(tmp_path, config))


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": YARN, "rope_theta": 1e6},
        {"rope_parameters": BASE | YARN, "rope_scaling": YARN, "rope_theta": 1e6},
        {"rope_parameters": BASE | YARN, "rope_scaling": BASE | YARN},
        {"rope_parameters": BASE | YARN, "rope_scaling": None},
    ],
    ids=["transformers 4", "both, the base beside them", "both, with the base", "transformers 5"],
)
def test_sections_that_agree_are_read(tmp_path, config):
    found = read_config(a_folder(tmp_path, LLAMA | config)).rope_parameters
    assert found["rope_theta"] == 1e6
    assert found["rope_type"] == "yarn"


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "rope_parameters": BASE | {"rope_theta": 1e4}, "rope_scaling": YARN},
        {"model_type": "ernie4_5", "rope_parameters": BASE | {"rope_theta": 5e5}, "rope_scaling": YARN},
        {
            "model_type": "gemma3_text",
            "rope_parameters": {"full_attention": BASE},
            "rope_scaling": {"full_attention": BASE},
        },
    ],
    ids=["the default base", "the architecture's default base", "equal sections by layer type"],
)
def test_sections_that_leave_the_base_unchanged_are_accepted(tmp_path, config):
    check_rope_sections(tmp_path, config)


def test_an_architecture_that_transformers_has_needs_no_code_of_its_own(tmp_path):
    assert read_config(a_folder(tmp_path, LLAMA | CODE)).model_type == "llama"


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (LLAMA | {"vocab_size": 7}, 7),
        (LLAMA, 32000),
        ({"model_type": "gemma3", "text_config": {"vocab_size": 9}}, 9),
        ({"model_type": "new", "vocab_size": 7}, 7),
        ({"model_type": "new"}, None),
    ],
    ids=["named", "by the class", "of the text model", "of an architecture that is not known", "unknown"],
)
def test_rows_of_the_embedding(tmp_path, config, rows):
    assert embedding_rows(a_folder(tmp_path, config)) == rows


def test_a_folder_without_a_config_is_refused_by_every_reader(tmp_path):
    for read in (read_config, embedding_rows):
        with pytest.raises(ModelError, match=r"has no config\.json"):
            read(tmp_path)
