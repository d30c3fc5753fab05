"""vLLM arguments that a target accepts, and configurations that it refuses."""

import re
from typing import Any

import pytest

from cluster.config import SlipstreamConfig, validated
from cluster.config_sections import BREAKS, ELSEWHERE
from cluster.errors import ConfigError

SMALLEST: dict[str, Any] = {
    "model": {"target": "org/target"},
    "target": {"engine": "vllm", "cache_per_rank": {"gib": 1}},
    "draft": {"method": "ngram"},
}


def with_target(**more: Any) -> SlipstreamConfig:
    return validated({**SMALLEST, "target": {**SMALLEST["target"], **more}})


def test_arguments_pass_as_they_are() -> None:
    given = {"quantization": "fp8", "enforce_eager": True, "compilation_config": {"cudagraph_mode": "FULL"}}
    assert with_target(vllm=given).target.vllm == given


@pytest.mark.parametrize("name", BREAKS)
def test_what_would_break_a_guarantee_is_refused_by_name_and_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"vllm.{name} cannot be set: {BREAKS[name]}")):
        with_target(vllm={name: True})


@pytest.mark.parametrize("name", ["kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"])
def test_whatever_makes_vllm_fetch_pages_from_elsewhere_is_refused(name: str) -> None:
    """The latter two make vLLM create a connector on its own."""
    with pytest.raises(ConfigError, match=f"vllm.{name} cannot be set: pages from elsewhere are untested"):
        with_target(vllm={name: 1})


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_has_a_key_of_its_own_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"vllm.{name} is {ELSEWHERE[name]} here")):
        with_target(vllm={name: 1})


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"async_scheduling.*dtype"):
        with_target(vllm={"async_scheduling": True, "dtype": "float32"})


def test_arguments_without_the_engine_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="engine is slipstream"):
        with_target(engine="slipstream", vllm={"enforce_eager": True})


def test_on_cpus_the_cache_needs_a_size() -> None:
    with pytest.raises(ConfigError, match="gib is missing"):
        with_target(cache_per_rank={})
    assert with_target(cache_per_rank={}, resources_per_rank={"num_gpus": 1}).target.cache_per_rank.gib is None


def test_a_mixed_pool_has_a_replica_of_each_engine_and_asks_what_both_can() -> None:
    two = {"engine": "mixed", "replicas": {"max": 2}}
    assert with_target(**two).target.vllm == {}
    with pytest.raises(ConfigError, match=r"replicas\.max is 1"):
        with_target(engine="mixed")
    with pytest.raises(ConfigError, match="gib is missing"):
        with_target(**two, cache_per_rank={})
    with pytest.raises(ConfigError, match="acceptance is rejection"):
        validated({**SMALLEST, "target": {**SMALLEST["target"], **two}, "speculation": {"acceptance": "rejection"}})


@pytest.mark.parametrize("engine", ["vllm", "mixed"])
def test_pages_that_vllm_keeps_are_as_large_as_vllm_says(engine: str) -> None:
    """Routers count what a replica's cache holds of a prompt in pages of one size."""
    with pytest.raises(ConfigError, match=r"remove cache_per_rank\.page_size"):
        with_target(engine=engine, replicas={"max": 2}, cache_per_rank={"gib": 1, "page_size": 32})


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"speculation": {"acceptance": "rejection"}}, "speculation.acceptance is rejection"),
        (
            {"draft": {"method": "eagle", "model": "org/head", "states": {"keep": False}}},
            "draft.states.keep is false",
        ),
    ],
)
def test_what_only_the_own_engine_tells_is_not_asked_of_vllm(sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validated({**SMALLEST, **sections})
    own = {"engine": "slipstream"}
    assert validated({**SMALLEST, "target": own, **sections}).target.engine == "slipstream"
