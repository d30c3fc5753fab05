"""Converts a configuration into Serve's deployment data, the content of a file for `serve deploy`. Pure.

The command line, KubeRay and `serve deploy` use this data. When an application's arguments change, Serve replaces all
replicas. Options below `deployments` have narrower effects: bounds concern only Serve's controller, `user_config` is
passed to running replicas, and changed `ray_actor_options` replace only the replicas of their deployment. A section for
one deployment is therefore an environment variable of its processes.
"""

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from cluster.config import DraftPool, ServerConfig, SlipstreamConfig
from cluster.config_sections import STATE_READERS
from cluster.errors import ConfigError
from cluster.placement import AUTOSCALING_POLICY, actor_options, autoscaling_config, scaling_settings

Json = dict[str, Any]

# Distinct from variables that override configuration keys, which may be set on a node.
DRAFT = "SLIPSTREAM_DRAFT_SECTION"  # section for drafters
SERVER = "SLIPSTREAM_SERVER_SECTION"  # section for routers
TEMPLATES = "SLIPSTREAM_DRAFT_TEMPLATES"  # sources of chat templates for routers, by draft pool
ROUTER_OPTIONS = {"num_cpus": 0.1}
CPUS_PER_ROUTER = 8  # cores beside a router, for the models and proxies that it keeps busy
MAX_DEFAULT_ROUTERS = 4
ROUTER_SHUTDOWN_S = 5  # seconds after `server.drain_s` to fail the remaining requests
DRAFTERS_ONLY = "set for drafters only"  # replaces the draft model for other deployments
SMALLEST_MIXED_POOL = {"max": 2}  # replaces the bounds of a mixed pool, whose minimum size is 2
POOL_KEYS = {"replicas", "resources", "cache", "max_sessions"}
DRAFTER_ONLY_METHODS = {"draft_model", "ngram", "layer_skip", "suffix"}  # methods whose options do not affect targets


def shared_config(config: SlipstreamConfig) -> Json:
    """Returns the configuration for all deployments, without default values.

    Includes the drafting method if it reads hidden states, which targets send, and the log format.
    """
    given = config.given(server=set(ServerConfig.model_fields) - {"log_format"}, kubernetes=True)
    for section in (given, *given.get("models", {}).values()):
        target = section.get("target", {})
        if target.pop("replicas", None) is not None and target.get("engine") == "mixed":
            target["replicas"] = SMALLEST_MIXED_POOL
    given["draft"] = _shared_draft(config.draft)
    given["drafts"] = {name: _shared_draft(draft) for name, draft in config.drafts.items()}
    return {section: keys for section, keys in given.items() if keys}


def _shared_draft(draft: DraftPool) -> Json:
    given: Json = draft.model_dump(mode="json", exclude_defaults=True, exclude={*POOL_KEYS, "prompt"})
    if draft.model_method not in STATE_READERS:
        given = {name: value for name, value in given.items() if name not in DRAFTER_ONLY_METHODS}
        if draft.model is not None:
            given["model"] = DRAFTERS_ONLY
            given.pop("tokenizer", None)
    return given


def deployment_parts(config: SlipstreamConfig) -> dict[str, Json]:
    """Returns each deployment's part of the configuration, by name, as options of `serve deploy`."""
    targets: dict[str, Json] = {}
    drafters: dict[str, Json] = {}
    trainers: dict[str, Json] = {}
    for one in config.served:
        draft = one.config.draft
        targets[one.target] = {
            "autoscaling_config": autoscaling_config(one.config.target.replicas),
            "user_config": scaling_settings(one),
        }
        own = _environment({DRAFT: _given(draft, "replicas")})
        drafters[one.drafter] = {
            "autoscaling_config": autoscaling_config(draft.replicas),
            "ray_actor_options": {**_placement(draft), **own},
        }
        if draft.learning is not None:
            trainers[one.trainer] = {"ray_actor_options": {**actor_options(draft.learning.resources), **own}}
    for_routers = {SERVER: _given(config.server, "routers")}
    if templates := draft_templates(config, {}):
        for_routers[TEMPLATES] = templates
    router = {**router_sizes(config), "ray_actor_options": {**ROUTER_OPTIONS, **_environment(for_routers)}}
    return {**targets, **drafters, "Router": router, **trainers}


def router_sizes(config: SlipstreamConfig) -> Json:
    """Returns the routers' options: their number, the requests per router, and the shutdown time."""
    server = config.server
    most = server.max_requests * len(config.served)
    return {
        "num_replicas": server.routers,
        # Twice the router's limit: a full router answers 429, whereas Serve's proxy would queue requests silently.
        "max_ongoing_requests": 2 * most,
        "max_queued_requests": most,
        "graceful_shutdown_timeout_s": server.drain_s + ROUTER_SHUTDOWN_S,
    }


def with_default_routers(config: SlipstreamConfig, cpus: float) -> SlipstreamConfig:
    """Sets an omitted `server.routers` from the CPUs of the cluster."""
    if "routers" in config.server.model_fields_set:
        return config
    routers = min(max(1, int(cpus / CPUS_PER_ROUTER)), MAX_DEFAULT_ROUTERS)
    return config.model_copy(update={"server": config.server.model_copy(update={"routers": routers})})


def _placement(draft: DraftPool) -> Json:
    """Returns options that place drafters on nodes with their labels.

    Serve builds an application on a node with the labels of all deployments, and fails if there is none yet. With a
    fallback, even of the same labels, it builds on any node.
    """
    options = actor_options(draft.resources)
    labels = draft.resources.labels
    return {**options, "fallback_strategy": [{"label_selector": dict(labels)}]} if labels else options


def _given(section: BaseModel, excluded: str) -> Json:
    return section.model_dump(mode="json", exclude_defaults=True, exclude={excluded})


def _environment(parts: Mapping[str, Json]) -> Json:
    values = {variable: json.dumps(part, sort_keys=True) for variable, part in parts.items()}
    escaped = {variable: value.replace("$", r"\u0024") for variable, value in values.items()}  # Ray expands ${NAME}
    return {"runtime_env": {"env_vars": escaped}}


def with_own_part(config: SlipstreamConfig, environment: Mapping[str, str]) -> SlipstreamConfig:
    """Adds this deployment's sections, from its environment, to the shared configuration."""
    own_sections: dict[str, BaseModel] = {}
    if DRAFT in environment:
        own_sections["draft"] = DraftPool.model_validate_json(environment[DRAFT])
    if SERVER in environment:
        own_sections["server"] = ServerConfig.model_validate_json(environment[SERVER])
    return config.model_copy(update=own_sections)


def draft_templates(config: SlipstreamConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the source of the chat template for drafts of each pool that has one, from the router's environment."""
    if TEMPLATES in environment:
        sources: dict[str, str] = json.loads(environment[TEMPLATES])
        return sources
    return {one.drafter: source for one in config.served if (source := one.config.draft.template) is not None}


def deployed_drain_s(application: Mapping[str, Any]) -> float | None:
    """Returns the drain time from Serve's record of an application, or None if it has no routers."""
    routers = [one for one in application.get("deployments", []) if one["name"] == "Router"]
    timeout_s: float | None = routers[0].get("graceful_shutdown_timeout_s") if routers else None
    return None if timeout_s is None else max(0.0, timeout_s - ROUTER_SHUTDOWN_S)


APPLICATION = "slipstream"
IMPORT_PATH = "serve_app.app:build"


def application(
    config: SlipstreamConfig,
    name: str = APPLICATION,
    route_prefix: str = "/",
    more: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Json:
    """Returns the deployment data of one application; `more` overrides options by deployment."""
    apart = deployment_parts(config)
    return {
        "name": name,
        "route_prefix": route_prefix,
        "import_path": IMPORT_PATH,
        # The policy scales both pools; without it, the draft pool keeps its initial size.
        "autoscaling_policy": dict(AUTOSCALING_POLICY),
        "deployments": [{"name": one, **_with(apart[one], more.get(one, {}))} for one in apart],
        "args": shared_config(config),
    }


def _with(options: Mapping[str, Any], more: Mapping[str, Any]) -> Json:
    """Merges options by name, and those in `ray_actor_options` likewise."""
    of_processes = {**options.get("ray_actor_options", {}), **more.get("ray_actor_options", {})}
    return {**options, **more, **({"ray_actor_options": of_processes} if of_processes else {})}


def serve_file(applications: Iterable[Json], http_options: Mapping[str, Any], **more: Any) -> Json:
    """Returns the deployment data of all applications on one Ray cluster."""
    return {**more, "http_options": dict(http_options), "applications": list(applications)}


def http_options(config: SlipstreamConfig) -> Json:
    """Returns the address and keep-alive time of Serve's proxies. Raises ConfigError for port 0."""
    server = config.server
    if server.port == 0:
        raise ConfigError("server.port is 0, so ports would differ between nodes; set a fixed port")
    return {"host": server.host, "port": server.port, "keep_alive_timeout_s": server.keep_alive_s}


def deploy_file(config: SlipstreamConfig) -> Json:
    """Returns a file for `serve deploy` on any Ray cluster, with a proxy on each router's node."""
    return serve_file([application(config)], http_options(config), proxy_location="EveryNode")
