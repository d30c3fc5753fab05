"""What Serve is told of a deployment, as data: the content of a file for `serve deploy`. Pure.

The command line, KubeRay and `serve deploy` are all given this.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cluster.config import SlipstreamConfig
from cluster.errors import ConfigError
from cluster.placement import AUTOSCALING_POLICY

Json = dict[str, Any]

APPLICATION = "slipstream"
IMPORT_PATH = "serve_app.app:build"


def application(
    arguments: Mapping[str, Any],
    name: str = APPLICATION,
    route_prefix: str = "/",
    deployments: Sequence[Mapping[str, Any]] = (),
) -> Json:
    """One application; `arguments` are its configuration, `deployments` what is to differ from `serve_app.app`."""
    told: Json = {
        "name": name,
        "route_prefix": route_prefix,
        "import_path": IMPORT_PATH,
        # It sees both pools. Without it the draft pool would keep the size that it begins with.
        "autoscaling_policy": dict(AUTOSCALING_POLICY),
    }
    if deployments:
        told["deployments"] = [dict(one) for one in deployments]
    return {**told, "args": dict(arguments)}


def serve_file(applications: Iterable[Json], http_options: Mapping[str, Any], **more: Any) -> Json:
    """All that one Ray cluster serves."""
    return {**more, "http_options": dict(http_options), "applications": list(applications)}


def arguments(config: SlipstreamConfig) -> Json:
    """The configuration as an application is given it: what differs from the defaults."""
    given: Json = config.model_dump(mode="json", exclude_defaults=True)
    return given


def http_options(config: SlipstreamConfig) -> Json:
    """Where Serve's proxies listen, and how long they keep connections. Raises ConfigError for any free port."""
    server = config.server
    if server.port == 0:
        raise ConfigError("server.port is 0, any free port, which each node would choose for itself; give a number")
    return {"host": server.host, "port": server.port, "keep_alive_timeout_s": server.keep_alive_s}


def whole_file(config: SlipstreamConfig) -> Json:
    """For `serve deploy`, on any Ray cluster: a proxy on each node that has a router."""
    return serve_file([application(arguments(config))], http_options(config), proxy_location="EveryNode")
