"""Deploys a config as `serve deploy` does, from its data: only so does Serve take an application's autoscaling policy.

Serve has no public call for it but over its dashboard, which a local cluster has none of. Hence the private ones here
and nowhere else.
"""

from typing import Any

from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from cluster.config import SlipstreamConfig
from serve_app.declaration import application


def deploy(config: SlipstreamConfig, name: str, route_prefix: str = "/") -> None:
    """Returns once the application runs; raises RuntimeError with what Serve says if it does not start."""
    ours = application_schema(config, name, route_prefix)
    client = _get_global_client()
    _apply([*_others(name), ours])
    client._wait_for_application_running(name)
    client.wait_for_proxies_serving(wait_for_applications_running=True)


def withdraw(name: str) -> None:
    """The opposite; nor does a controller that starts anew bring the application back."""
    serve.delete(name)
    _apply(_others(name))


def application_schema(config: SlipstreamConfig, name: str, route_prefix: str) -> ServeApplicationSchema:
    """What is below `applications` in a file for `serve deploy`."""
    return ServeApplicationSchema.model_validate(application(config, name, route_prefix))


def is_running() -> bool:
    """Whether Serve runs on the cluster that this process is connected to."""
    return _get_global_client(raise_if_no_controller_running=False) is not None


def serve_details() -> dict[str, Any]:
    """What Serve says of itself, of its proxies and of all applications."""
    details: dict[str, Any] = _get_global_client().get_serve_details()
    return details


def _apply(applications: list[ServeApplicationSchema]) -> None:
    """Serve takes the whole list: what was deployed in this way and is not in it ends."""
    capacity = serve_details().get("target_capacity")
    _get_global_client().deploy_apps(ServeDeploySchema(applications=applications, target_capacity=capacity))


def _others(name: str) -> list[ServeApplicationSchema]:
    """Applications of others on the same cluster that were deployed from data."""
    deployed = {other: one.get("deployed_app_config") for other, one in serve_details()["applications"].items()}
    return [ServeApplicationSchema.model_validate(data) for other, data in deployed.items() if data and other != name]
