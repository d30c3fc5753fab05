"""What Serve is told of a deployment, as data: the content of a file for `serve deploy`. Pure.

The command line, KubeRay and `serve deploy` are all given this.

Which part of a configuration each deployment is told, so that only those are replaced whose part has changed. Pure.

Serve makes one version of an application's arguments, and replaces every replica once that is another. What is below
`deployments` has no part in it: bounds are for Serve's controller alone, `user_config` is given to replicas that run,
and other `ray_actor_options` replace the replicas of their deployment alone. So a section that is of one deployment
alone is an environment variable of its processes.
"""

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from cluster.config import DraftPool, ServerConfig, SlipstreamConfig
from cluster.config_sections import STATE_READERS
from cluster.errors import ConfigError
from cluster.placement import AUTOSCALING_POLICY, actor_options, bounds, scaling_settings

Json = dict[str, Any]

# Not of the variables that override a file's keys, for a node may have those of its own.
DRAFT = "SLIPSTREAM_TOLD_DRAFT"  # of drafters
SERVER = "SLIPSTREAM_TOLD_SERVER"  # of routers
ROUTER_OPTIONS = {"num_cpus": 0.1}
ROUTER_ENDS_S = 5  # after `server.drain_s`, to end the requests that are left with an error
OF_DRAFTERS_ALONE = "as drafters are told"  # in the place of a model that nobody else loads
OF_SERVE_ALONE = {"max": 2}  # in the place of a mixed pool's bounds: the fewest replicas that it may have
POOLS_ALONE = {"replicas", "resources", "cache", "max_sessions"}
METHODS_ALONE = {"draft_model", "prompt_lookup", "layer_skip", "suffix"}  # options that change nothing at a target


def shared(config: SlipstreamConfig) -> Json:
    """What all deployments are told, as a configuration: what differs from the defaults.

    Of drafters, what targets must know to serve them: a method that reads their hidden states as a whole. Of the
    server, what targets and drafters write their logs by.
    """
    routers_alone = set(ServerConfig.model_fields) - {"log_format"}
    given: Json = config.model_dump(
        mode="json",
        exclude_defaults=True,
        exclude={"draft": POOLS_ALONE, "target": {"replicas"}, "server": routers_alone},
    )
    if config.target.engine == "mixed":
        given["target"]["replicas"] = OF_SERVE_ALONE
    if config.draft.model_method not in STATE_READERS:
        given["draft"] = {name: value for name, value in given["draft"].items() if name not in METHODS_ALONE}
        if config.draft.model is not None:
            given["draft"]["model"] = OF_DRAFTERS_ALONE
    return {section: keys for section, keys in given.items() if keys}


def told_apart(config: SlipstreamConfig) -> dict[str, Json]:
    """What each deployment is told beyond that, by its name: options of `serve deploy` for it."""
    return {
        "Target": {
            "autoscaling_config": bounds(config.target.replicas),
            "user_config": scaling_settings(config.target, config.draft),
        },
        "Drafter": {
            "autoscaling_config": bounds(config.draft.replicas),
            "ray_actor_options": {**_placed(config.draft), **_telling(DRAFT, config.draft, "replicas")},
        },
        "Router": {
            **router_sizes(config.server),
            "ray_actor_options": {**ROUTER_OPTIONS, **_telling(SERVER, config.server, "routers")},
        },
    }


def router_sizes(server: ServerConfig) -> Json:
    """How many routers there are, what Serve gives to each at once, and how long each may take to end."""
    return {
        "num_replicas": server.routers,
        # Above the router's own limit, which answers 429: what Serve holds back would wait unseen at its proxy.
        "max_ongoing_requests": 2 * server.max_requests,
        "max_queued_requests": server.max_requests,
        "graceful_shutdown_timeout_s": server.drain_s + ROUTER_ENDS_S,
    }


def _placed(draft: DraftPool) -> Json:
    """Serve builds an application on a node that has the labels of all deployments named here; while no node has those
    of drafters, it would build none. With an alternative, though it is the same labels, it builds on any node.
    """
    options = actor_options(draft.resources)
    labels = draft.resources.labels
    return {**options, "fallback_strategy": [{"label_selector": dict(labels)}]} if labels else options


def _telling(variable: str, section: BaseModel, but: str) -> Json:
    given = section.model_dump(mode="json", exclude_defaults=True, exclude={but})
    told = json.dumps(given, sort_keys=True).replace("$", r"\u0024")  # Ray would take ${NAME} for a node's variable
    return {"runtime_env": {"env_vars": {variable: told}}}


def as_told(config: SlipstreamConfig, environment: Mapping[str, str]) -> SlipstreamConfig:
    """With the section that the process is told apart, where the configuration that all are told is not the whole."""
    apart: dict[str, BaseModel] = {}
    if DRAFT in environment:
        apart["draft"] = DraftPool.model_validate_json(environment[DRAFT])
    if SERVER in environment:
        apart["server"] = ServerConfig.model_validate_json(environment[SERVER])
    return config.model_copy(update=apart)


def told_drain_s(application: Mapping[str, Any]) -> float | None:
    """How long routers were told to let requests finish, of what Serve was told of an application, if that says so."""
    routers = [one for one in application.get("deployments", []) if one["name"] == "Router"]
    timeout_s: float | None = routers[0].get("graceful_shutdown_timeout_s") if routers else None
    return None if timeout_s is None else max(0.0, timeout_s - ROUTER_ENDS_S)


APPLICATION = "slipstream"
IMPORT_PATH = "serve_app.app:build"


def application(
    config: SlipstreamConfig,
    name: str = APPLICATION,
    route_prefix: str = "/",
    more: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Json:
    """One application; `more` is by deployment, and differs from what the configuration says."""
    apart = told_apart(config)
    return {
        "name": name,
        "route_prefix": route_prefix,
        "import_path": IMPORT_PATH,
        # It sees both pools. Without it the draft pool would keep the size that it begins with.
        "autoscaling_policy": dict(AUTOSCALING_POLICY),
        "deployments": [{"name": one, **_with(apart[one], more.get(one, {}))} for one in apart],
        "args": shared(config),
    }


def _with(options: Mapping[str, Any], more: Mapping[str, Any]) -> Json:
    """Those of processes are joined."""
    of_processes = {**options.get("ray_actor_options", {}), **more.get("ray_actor_options", {})}
    return {**options, **more, **({"ray_actor_options": of_processes} if of_processes else {})}


def serve_file(applications: Iterable[Json], http_options: Mapping[str, Any], **more: Any) -> Json:
    """All that one Ray cluster serves."""
    return {**more, "http_options": dict(http_options), "applications": list(applications)}


def http_options(config: SlipstreamConfig) -> Json:
    """Where Serve's proxies listen, and how long they keep connections. Raises ConfigError for any free port."""
    server = config.server
    if server.port == 0:
        raise ConfigError("server.port is 0, any free port, which each node would choose for itself; give a number")
    return {"host": server.host, "port": server.port, "keep_alive_timeout_s": server.keep_alive_s}


def whole_file(config: SlipstreamConfig) -> Json:
    """For `serve deploy`, on any Ray cluster: a proxy on each node that has a router."""
    return serve_file([application(config)], http_options(config), proxy_location="EveryNode")
