"""Tests the replicas replaced by a configuration change, with Serve's own rule for application versions."""

import os
from typing import Any, get_args
from unittest.mock import patch

import pytest
from ray._private.utils import update_envs
from ray.serve._private.application_state import _get_shared_build_app_label_selector
from ray.serve._private.deploy_utils import get_app_code_version

from cluster.config import ENVIRONMENT_PREFIX, DraftPool, SlipstreamConfig, TargetPool, validated
from cluster.errors import ConfigError
from serve_app.operations.deploying import application_schema
from serve_app.serve_manifest import deployed_drain_s, draft_templates, shared_config, with_own_part

PLACED = ("ray_actor_options", "placement_group_bundles", "placement_group_strategy", "max_replicas_per_node")
NOBODY: set[str] = set()
POOLS = {"Target", "Drafter", "Router"}
CONFIG: dict[str, Any] = {
    "model": {"target": "owner/target"},
    "target": {"max_sessions": 8, "replicas": {"max": 2}},
    "draft": {"model": "owner/draft", "max_sessions": 20, "resources": {"labels": {"pool": "draft"}}},
    "server": {"routers": 2, "drain_s": 20, "keys": {"one": {"sha256": 64 * "0"}}},
}
SUFFIX = {"draft": {"method": "suffix", "model": None, "suffix": {"max_ngram": 8}}}
EAGLE = {"draft": {"method": "eagle", "model": "owner/head", "eagle": {"states": [1, 2]}}}
LOOKUP_FIRST = {"draft": {"method": "hybrid", "model": "owner/draft"}}


def merged(data: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    nested = {name: merged(data.get(name, {}), one) for name, one in more.items() if isinstance(one, dict)}
    return {**data, **more, **nested}


def deployments(config: SlipstreamConfig) -> dict[str, dict[str, Any]]:
    schema = application_schema(config, "ours", "/")
    return {one.name: one.model_dump(exclude_unset=True) for one in schema.deployments}


def own_environment(config: SlipstreamConfig, pool: str) -> dict[str, str]:
    variables: dict[str, str] = deployments(config)[pool]["ray_actor_options"]["runtime_env"]["env_vars"]
    return variables


def replaced(before: SlipstreamConfig, after: SlipstreamConfig) -> set[str]:
    """Returns the deployments that Serve would replace because of their version or placement."""
    versions = {get_app_code_version(application_schema(config, "ours", "/")) for config in (before, after)}
    if len(versions) > 1:
        return POOLS
    old, new = deployments(before), deployments(after)
    return {name for name in POOLS if any(old[name].get(option) != new[name].get(option) for option in PLACED)}


def reconfigured(before: SlipstreamConfig, after: SlipstreamConfig) -> set[str]:
    old, new = deployments(before), deployments(after)
    return {name for name in POOLS if old[name].get("user_config") != new[name].get("user_config")}


def named(given: object) -> str:
    """Returns a test name independent of set order, which varies between processes."""
    return "+".join(sorted(given)) or "nobody" if isinstance(given, set) else str(given)


@pytest.mark.parametrize(
    ("change", "restarted", "updated"),
    [
        ({"draft": {"replicas": {"min": 0, "max": 4}}}, NOBODY, NOBODY),
        ({"target": {"replicas": {"min": 2, "max": 4}}}, NOBODY, NOBODY),
        ({"draft": {"replicas": {"down_delay_s": 60}}}, NOBODY, {"Target"}),
        ({"draft": {"replicas": {"max": 4, "per_target": 2}}}, NOBODY, {"Target"}),
        ({"target": {"replicas": {"up_delay_s": 1, "sessions_per_replica": 6}}}, NOBODY, {"Target"}),
        ({"target": {"replicas": {"first_token_s": 1}}}, NOBODY, {"Target"}),
        ({"server": {"routers": 3}}, NOBODY, NOBODY),
        ({"server": {"keys": {"two": {"sha256": 64 * "1"}}}}, {"Router"}, NOBODY),
        ({"server": {"log_format": "json"}}, POOLS, NOBODY),
        ({"kubernetes": {"image": "a:2"}}, NOBODY, NOBODY),
        ({"draft": {"model": "owner/other"}}, {"Drafter"}, NOBODY),
        ({"draft": {"prompt": "template"}}, {"Drafter", "Router"}, NOBODY),
        ({"draft": {"draft_model": {"quantization": "int8"}}}, {"Drafter"}, NOBODY),
        ({"draft": {"resources": {"threads": 2}, "cache": {"gib": 1}}}, {"Drafter"}, NOBODY),
        ({"draft": {"resources": {"num_gpus": 0.5}}}, {"Drafter"}, NOBODY),
        ({"draft": {"max_sessions": 40}}, {"Drafter"}, {"Target"}),
        ({"target": {"max_sessions": 16}}, POOLS, {"Target"}),
        ({"speculation": {"draft_tokens": 2}}, POOLS, NOBODY),
    ],
    ids=named,
)
def test_a_change_replaces_only_the_affected_deployments(
    change: dict[str, Any], restarted: set[str], updated: set[str]
) -> None:
    before, after = validated(CONFIG), validated(merged(CONFIG, change))
    assert before != after
    assert replaced(before, after) == restarted
    assert reconfigured(before, after) == updated


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ngram", {"ngram": {"max_ngram": 6}}),
        ("suffix", {"suffix": {"max_ngram": 6}}),
        ("layer_skip", {"layer_skip": {"layers": 2}}),
        ("hybrid", {"model": "owner/draft", "ngram": {"max_ngram": 6}}),
    ],
    ids=lambda given: str(given),
)
def test_options_of_independent_methods_affect_only_drafters(method: str, options: dict[str, Any]) -> None:
    chosen = {"model": {"target": "owner/target"}, "draft": {"method": method, "model": options.get("model")}}
    assert replaced(validated(chosen), validated(merged(chosen, {"draft": options}))) == {"Drafter"}


@pytest.mark.parametrize(
    ("change", "restarted"),
    [
        ({"draft": {"replicas": {"max": 3}}}, NOBODY),
        ({"draft": {"max_sessions": 40}}, {"Drafter"}),
        ({"draft": {"model": "owner/other"}}, POOLS),
        ({"draft": {"eagle": {"states": [1, 3]}}}, POOLS),
    ],
    ids=named,
)
def test_options_of_heads_affect_the_target(change: dict[str, Any], restarted: set[str]) -> None:
    data = merged({"model": {"target": "owner/target"}}, EAGLE)
    assert replaced(validated(data), validated(merged(data, change))) == restarted


@pytest.mark.parametrize(
    "more",
    [{}, EAGLE, LOOKUP_FIRST, SUFFIX],
    ids=["draft model", "head", "lookup first", "lookup"],
)
def test_the_parts_add_up_to_the_configuration(more: dict[str, Any]) -> None:
    config = validated(merged(CONFIG, more))
    schema = application_schema(config, "ours", "/")
    told = deployments(config)
    whole = validated(schema.args)
    for name in ("Drafter", "Router"):
        whole = with_own_part(whole, told[name]["ray_actor_options"]["runtime_env"]["env_vars"])
    bounds = {name: told[name]["autoscaling_config"] for name in ("Target", "Drafter")}
    assert [(one["min_replicas"], one["max_replicas"]) for one in bounds.values()] == [(1, 2), (1, 1)]
    assert told["Router"]["num_replicas"] == 2
    assert deployed_drain_s({"deployments": list(told.values())}) == 20
    replicas = {"replicas": config.target.replicas}
    sections = {
        "target": whole.target.model_copy(update=replicas),
        "draft": whole.draft.model_copy(update={"replicas": config.draft.replicas}),
        "server": whole.server.model_copy(update={"routers": 2}),
    }
    assert whole.model_copy(update=sections) == config


def with_engine_and_method(engine: str, method: str) -> SlipstreamConfig:
    """Returns a configuration with a draft model if the method takes one."""
    target = {"engine": engine, "cache_per_rank": {"gib": 1}}
    try:
        return validated(merged(CONFIG, {"target": target, "draft": {"method": method, "model": "owner/model"}}))
    except ConfigError:
        return validated(merged(CONFIG, {"target": target, "draft": {"method": method, "model": None}}))


@pytest.mark.parametrize("engine", get_args(TargetPool.model_fields["engine"].annotation))
@pytest.mark.parametrize("method", get_args(DraftPool.model_fields["method"].annotation))
def test_the_shared_part_is_a_valid_configuration(engine: str, method: str) -> None:
    config = with_engine_and_method(engine, method)
    told = validated(shared_config(config))
    assert (told.target.engine, told.draft.method) == (engine, method)


def test_bounds_of_a_mixed_pool_replace_no_deployment() -> None:
    mixed = merged(CONFIG, {"target": {"engine": "mixed", "cache_per_rank": {"gib": 1}}})
    more = merged(mixed, {"target": {"replicas": {"min": 2, "max": 4}}})
    assert replaced(validated(mixed), validated(more)) == NOBODY
    assert deployments(validated(more))["Target"]["autoscaling_config"]["max_replicas"] == 4


def test_without_an_own_part_the_shared_configuration_applies() -> None:
    config = validated(CONFIG)
    assert with_own_part(config, {"PATH": "/bin"}) == config


def test_node_variables_do_not_override_a_replicas_part() -> None:
    config = validated(CONFIG)
    assert with_own_part(config, {"SLIPSTREAM__SERVER": "{}", "SLIPSTREAM__DRAFT": '{"method": "suffix"}'}) == config
    variables = {name for pool in ("Drafter", "Router") for name in own_environment(config, pool)}
    assert len(variables) == 2
    assert not [name for name in variables if name.startswith(ENVIRONMENT_PREFIX)]


def test_dollar_signs_survive_rays_expansion() -> None:
    server = {
        "audit": {"records": "/var/log/${POD_NAME}.jsonl"},
        "response_template": {"content": r"^(.*?)(\$HOME|${UNSET})?$"},
    }
    config = validated(merged(CONFIG, {"server": server, "draft": {"model": "/models/$HOME/draft"}}))
    with patch.dict(os.environ, {"POD_NAME": "pod", "HOME": "/root"}):
        for pool in ("Drafter", "Router"):
            update_envs(own_environment(config, pool))
        whole = with_own_part(config, os.environ)
    assert whole.server.audit == config.server.audit
    assert whole.server.response_template == config.server.response_template
    assert whole.draft.model == config.draft.model


@pytest.mark.parametrize("labels", [{}, {"pool": "draft"}], ids=["anywhere", "on nodes with a label"])
def test_the_application_is_built_without_a_node_for_drafters(labels: dict[str, str]) -> None:
    config = validated(merged(CONFIG, {"draft": {"resources": {"labels": labels}}}))
    assert _get_shared_build_app_label_selector(application_schema(config, "ours", "/")) is None


def test_autoscaling_policies_are_not_part_of_the_deployments() -> None:
    told = deployments(validated(CONFIG))
    assert all("policy" not in told[name]["autoscaling_config"] for name in ("Target", "Drafter"))


def test_the_parts_of_several_models_add_up_to_the_configuration() -> None:
    """Sizes and rules of scaling never reach the shared part."""
    target = {"max_sessions": 8, "replicas": {"max": 2}}
    models = {
        "a": {"model": {"target": "owner/a"}, "target": target},
        "b": {"model": {"target": "owner/b"}, "draft": "named"},
    }
    drafts = {"named": {"method": "suffix", "max_sessions": 9}}
    config = validated({**{key: CONFIG[key] for key in ("draft", "server")}, "models": models, "drafts": drafts})
    told = deployments(config)
    assert list(told) == ["Target-a", "Target-b", "Drafter", "Drafter-named", "Router"]
    shared = validated(shared_config(config))
    for before, after in zip(config.served, shared.served, strict=True):
        drafter = with_own_part(after.config, told[after.drafter]["ray_actor_options"]["runtime_env"]["env_vars"])
        sizes = {"replicas": before.config.draft.replicas}
        assert drafter.draft.model_copy(update=sizes) == before.config.draft
        assert (after.target, after.drafter, after.config.model) == (before.target, before.drafter, before.config.model)
        assert after.config.target.replicas == TargetPool().replicas


def test_routers_get_the_template_of_each_pool_that_has_one() -> None:
    model = {"model": {"target": "owner/target"}}
    pools = {
        "draft": {"model": "owner/draft", "prompt": "template"},
        "drafts": {
            "other": {"model": "owner/other", "tokenizer": "own/${er}", "prompt": "template"},
            "text": {"model": "x"},
        },
    }
    models = {"a": model, "b": {**model, "draft": "other"}, "c": {**model, "draft": "text"}}
    config = validated({"models": models, **pools})
    templates = {"Drafter": "owner/draft", "Drafter-other": "own/${er}"}
    with patch.dict(os.environ):
        update_envs(own_environment(config, "Router"))
        assert draft_templates(validated(shared_config(config)), os.environ) == templates
    assert draft_templates(config, {}) == templates, "without the file for `serve deploy`"
    assert draft_templates(validated(shared_config(config)), {}) == {}
