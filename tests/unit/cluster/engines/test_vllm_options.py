"""Tests the vLLM arguments that a target accepts, and the configurations that it refuses."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import SlipstreamConfig, load_config, validated
from cluster.errors import ConfigError

SMALLEST: dict[str, Any] = {
    "model": {"target": "org/target"},
    "target": {"engine": "vllm", "cache_per_rank": {"gib": 1}},
    "draft": {"method": "ngram"},
}


def with_target(**more: Any) -> SlipstreamConfig:
    return validated({**SMALLEST, "target": {**SMALLEST["target"], **more}})


def test_arguments_pass_unchanged() -> None:
    given = {"quantization": "fp8", "enforce_eager": True, "compilation_config": {"cudagraph_mode": "FULL"}}
    assert with_target(vllm=given).target.vllm == given


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ("async_scheduling", "cannot be set: it schedules steps before the tokens"),
        ("speculative_config", "cannot be set: drafters provide the drafts"),
        ("pipeline_parallel_size decode_context_parallel_size", "cannot be set: .*untested"),
        ("data_parallel_size", "cannot be set: a replica is one engine"),
        # The last two make vLLM create a connector.
        ("kv_transfer_config kv_offloading_size kv_offloading_backend", "cannot be set: externally stored pages"),
        ("scheduler_cls worker_cls worker_extension_cls logits_processors", "cannot be set: Slipstream"),
        ("skip_tokenizer_init", "cannot be set: only the router tokenizes text"),
        ("runner", "cannot be set: targets only generate text"),
        ("max_loras", r"cannot be set: .*target\.adapters"),
        ("model tokenizer", r"cannot be set; set model\.target instead"),
        ("served_model_name", r"cannot be set; set model\.served_name instead"),
        ("dtype", r"cannot be set; set model\.dtype instead"),
        ("max_model_len", r"cannot be set; set model\.max_context instead"),
        ("tensor_parallel_size", r"cannot be set; set target\.tensor_parallel instead"),
        ("max_num_seqs", r"cannot be set; set target\.max_sessions instead"),
        ("max_num_batched_tokens", r"cannot be set; set target\.max_step_tokens instead"),
        ("kv_cache_memory_bytes", r"cannot be set; set target\.cache_per_rank\.gib instead"),
    ],
)
def test_arguments_that_break_a_guarantee_or_have_their_own_key_are_refused(names: str, fault: str) -> None:
    for name in names.split():
        with pytest.raises(ConfigError, match=rf"vllm\.{name} {fault}"):
            with_target(vllm={name: True})


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=r"async_scheduling.*dtype"):
        with_target(vllm={"async_scheduling": True, "dtype": "float32"})


def test_arguments_without_the_engine_are_refused() -> None:
    with pytest.raises(ConfigError, match="engine is slipstream"):
        with_target(engine="slipstream", vllm={"enforce_eager": True})


def test_a_cache_on_cpus_needs_a_size() -> None:
    with pytest.raises(ConfigError, match="gib is missing"):
        with_target(cache_per_rank={})
    assert with_target(cache_per_rank={}, resources_per_rank={"num_gpus": 1}).target.cache_per_rank.gib is None


def test_a_mixed_pool_needs_a_replica_of_each_engine_and_features_of_both() -> None:
    two = {"engine": "mixed", "replicas": {"max": 2}}
    assert with_target(**two).target.vllm == {}
    with pytest.raises(ConfigError, match=r"replicas\.max is 1"):
        with_target(engine="mixed")
    with pytest.raises(ConfigError, match="gib is missing"):
        with_target(**two, cache_per_rank={})
    with pytest.raises(ConfigError, match="acceptance is rejection"):
        validated({**SMALLEST, "target": {**SMALLEST["target"], **two}, "speculation": {"acceptance": "rejection"}})


@pytest.mark.parametrize("engine", ["vllm", "mixed"])
def test_vllm_sets_the_size_of_its_pages(engine: str) -> None:
    """Routers assume a single page size for cached prompts."""
    with pytest.raises(ConfigError, match=r"remove cache_per_rank\.page_size"):
        with_target(engine=engine, replicas={"max": 2}, cache_per_rank={"gib": 1, "page_size": 32})


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"speculation": {"acceptance": "rejection"}}, "speculation.acceptance is rejection"),
        ({"model": {"target": "toy", "numerics": "invariant"}}, "model.numerics is invariant"),
        (
            {"draft": {"method": "eagle", "model": "org/head", "states": {"keep": False}}},
            "draft.states.keep is false",
        ),
    ],
)
def test_features_of_the_own_engine_alone_are_refused_for_vllm(sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validated({**SMALLEST, **sections})
    own = {"engine": "slipstream"}
    assert validated({**SMALLEST, "target": own, **sections}).target.engine == "slipstream"


ADAPTED: dict[str, Any] = {"vllm": {"enable_lora": True}, "adapters": {"sql": "./sql"}}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"engine": "slipstream", "vllm": {}},
            "target: .*engine slipstream does not support adapters; set engine to vllm",
        ),
        ({"engine": "mixed", "replicas": {"max": 2}}, "engine mixed does not support adapters"),
        ({"vllm": {}}, "adapters require vllm.enable_lora; set it to true"),
        ({"adapters": {"target": "./a"}}, "several models or adapters are served as target; rename"),
        ({"adapters": {"sql": {"path": "./a"}}}, "target.adapters.sql: expected a string"),
    ],
)
def test_adapters_need_vllm_and_names_of_their_own(change: dict[str, Any], why: str) -> None:
    assert with_target(**ADAPTED).api_names == ("target", "sql")
    with pytest.raises(ConfigError, match=why):
        with_target(**{**ADAPTED, **change})


def test_adapters_of_two_models_have_different_names() -> None:
    entry = {"model": SMALLEST["model"], "target": {**SMALLEST["target"], **ADAPTED}}
    with pytest.raises(ConfigError, match="several models or adapters are served as sql"):
        validated({"models": {"a": entry, "b": entry}, "draft": SMALLEST["draft"]})


def test_an_adapters_folder_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**SMALLEST, "target": {**SMALLEST["target"], **ADAPTED}}))
    assert load_config(tmp_path / "config.yaml").target.adapters == {"sql": str(tmp_path / "sql")}
