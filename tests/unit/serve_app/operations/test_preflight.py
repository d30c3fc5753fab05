"""Tests checks before a start, by engine, and on nodes without drafters."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.config import SlipstreamConfig, validated
from cluster.errors import ModelError
from serve_app.operations.preflight import check_models, check_target_model
from tests.broken_checkpoints import SIZES, edit_config, good_checkpoint
from tests.byte_tokenizer import TEMPLATE, byte_tokenizer
from tests.toy_tokenizers import sentence_piece


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_checkpoint(tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "model")


def config(target: Path, draft: dict[str, Any] | None = None, **pool: Any) -> SlipstreamConfig:
    return validated(
        {
            "model": {"target": str(target), "max_context": 128},
            "draft": draft or {"method": "ngram"},
            "target": {"cache_per_rank": {"gib": 1}, **pool},
        }
    )


def test_config_json_is_enough_without_weights(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert check_target_model(config(folder), with_weights=False) == folder


def test_an_architecture_only_vllm_knows_is_left_to_it(folder: Path) -> None:
    edit_config(model_type="its_own")(folder)
    target, end, draft = check_models(config(folder, engine="vllm"), with_weights=False)
    assert target == "target: its_own, left to vLLM; 259 tokens"
    assert end.startswith("text ends with token 256")
    assert draft == "draft: ngram, without a model of its own"
    for engine in ("slipstream", "mixed"):
        with pytest.raises(ModelError, match="model_type 'its_own'"):
            check_models(config(folder, engine=engine, replicas={"max": 2}), with_weights=False)


@pytest.mark.parametrize("engine", ["slipstream", "vllm"])
def test_a_rope_base_that_would_be_replaced_is_refused_for_every_engine(folder: Path, engine: str) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    edit_config(**rope, rope_theta=None, rope_scaling={"rope_type": "yarn", "factor": 4.0})(folder)
    with pytest.raises(ModelError, match="move rope_scaling's keys into rope_parameters"):
        check_models(config(folder, engine=engine), with_weights=False)


def test_the_tensors_of_a_head_are_checked(folder: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text("{}")
    tensors = {"0.0.linear.weight": torch.zeros(32, 32), "0.1.weight": torch.zeros(259, 32)}
    save_file(tensors, head / "model.safetensors")
    one = config(folder, {"method": "medusa", "model": str(head)})
    assert f"draft: medusa, head in {head}" in check_models(one, with_weights=False)
    save_file(tensors | {"0.0.linear.scale": torch.ones(1)}, head / "model.safetensors")
    with pytest.raises(ModelError, match=r"no supported Medusa head uses: 0\.0\.linear\.scale"):
        check_models(one, with_weights=False)


def test_tensor_parallelism_and_quantization_are_left_to_vllm(folder: Path) -> None:
    edit_config(quantization_config={"quant_method": "awq", "bits": 4})(folder)
    found = check_models(config(folder, engine="vllm", tensor_parallel=3), with_weights=False)
    assert "by vLLM" in found[0]


def test_an_adapters_folder_has_its_description(folder: Path, tmp_path: Path) -> None:
    pool = {"engine": "vllm", "vllm": {"enable_lora": True}, "adapters": {"sql": str(tmp_path), "chat": "org/Chat"}}
    with pytest.raises(ModelError, match=r"adapter sql: .* has no adapter_config\.json; correct target\.adapters\.sql"):
        check_models(config(folder, **pool), with_weights=False)
    (tmp_path / "adapter_config.json").write_text("{}")
    check_models(config(folder, **pool), with_weights=False)


@pytest.mark.parametrize("engine", ["slipstream", "vllm"])
def test_common_files_are_required_for_every_engine(folder: Path, engine: str) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        check_models(config(folder, engine=engine), with_weights=False)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        check_models(config(folder, engine=engine), with_weights=False)


def test_a_node_without_drafters_needs_no_draft(folder: Path) -> None:
    broken = folder.parent / "draft"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({}))
    drafted = config(folder, {"method": "draft_model", "model": str(broken)})
    assert len(check_models(drafted, with_weights=False, with_draft=False)) == 2
    with pytest.raises(ModelError, match="no model_type"):
        check_models(drafted, with_weights=False)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model folder"):
        check_models(config(tmp_path / "nothing"), with_weights=True)


def a_model(folder: Path, tokenizer: Any, template: str | None = TEMPLATE) -> Path:
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=len(tokenizer))).save_pretrained(folder)
    return folder


def pool_of(draft: Path, *targets: Path, **options: Any) -> SlipstreamConfig:
    """Returns models that share a draft pool, named by their folders."""
    models = {target.name: {"model": {"target": str(target), "max_context": 128}} for target in targets}
    return validated({"models": models, "draft": {"model": str(draft), **options}})


def pair_lines(config: SlipstreamConfig) -> dict[str, str]:
    """Returns the line about the draft's tokens of each model."""
    lines = [line for line in check_models(config, with_weights=False) if ": pair: " in line]
    return dict(line.split(": pair: ") for line in lines)


def test_a_pool_that_translates_for_one_model_translates_for_all(tmp_path: Path) -> None:
    same, other = a_model(tmp_path / "same", byte_tokenizer()), a_model(tmp_path / "other", sentence_piece(60))
    draft = a_model(tmp_path / "draft", byte_tokenizer())
    assert pair_lines(pool_of(draft, same)) == {"same": "same vocabulary"}
    pairs = pair_lines(pool_of(draft, same, other))
    assert pairs.keys() == {"same", "other"}
    assert all(pair.startswith("drafts are translated through text") for pair in pairs.values())
    templated = pair_lines(pool_of(draft, same, other, prompt="template"))
    assert all(pair.endswith("; chats are drafted from the draft's own chat template") for pair in templated.values())


def test_a_draft_prompt_requires_translation_and_a_template(tmp_path: Path) -> None:
    target = a_model(tmp_path / "target", sentence_piece(60))
    same = a_model(tmp_path / "same", sentence_piece(60))
    silent = a_model(tmp_path / "silent", byte_tokenizer(), template=None)
    for models in (lambda draft: config(target, draft), lambda draft: pool_of(Path(draft["model"]), target, **draft)):
        with pytest.raises(ModelError, match=r"has the target's vocabulary .*; remove draft\.prompt"):
            check_models(models({"model": str(same), "prompt": "template"}), with_weights=False)
        with pytest.raises(ModelError, match=r"has no chat template; set draft\.prompt to text"):
            check_models(models({"model": str(silent), "prompt": "template"}), with_weights=False)
