"""What Serve is told of a deployment, as data: the content of a file for `serve deploy`. Pure.

The command line, KubeRay and `serve deploy` are all given this.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from cluster.config import SlipstreamConfig
from cluster.errors import ConfigError
from cluster.placement import AUTOSCALING_POLICY
from serve_app.config_split import shared, told_apart

Json = dict[str, Any]

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
