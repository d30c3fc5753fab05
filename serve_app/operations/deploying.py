"""Deploys a configuration as data, like `serve deploy`, which is the only way to set an autoscaling policy.

Serve's only public call for this needs the dashboard, which a local cluster lacks. The private calls are confined to
this module.
"""

import re
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeApplicationSchema, ServeDeploySchema
from rich.markup import escape

from cluster.config import SlipstreamConfig
from cluster.errors import ConfigError, ModelError, SlipstreamError
from serve_app.serve_manifest import application, with_default_routers

POLL_S = 0.5
APPLICATION_KEY = "application"  # key of the whole application's message; deployments have capitalized names
ERROR_NAME = re.compile(r"\bcluster\.errors\.(\w+): ")  # name of an error in a replica's traceback
PERMANENT: Mapping[str, type[SlipstreamError]] = MappingProxyType(
    {"ConfigError": ConfigError, "ModelError": ModelError}
)


class StartError(SlipstreamError):
    """Raised if the application could not start."""


def deploy(
    config: SlipstreamConfig, name: str, route_prefix: str = "/", show: Callable[[str], None] = lambda line: None
) -> None:
    """Deploys the application and waits until it runs; without `server.routers`, cluster size sets their number.

    Until then, passes Serve's current messages, or an empty text, to `show`.

    Raises a replica's ModelError or ConfigError immediately, since Serve's retries would fail in the same way. For
    other failures, raises StartError with the cause after Serve has given up.
    """
    cpus = ray.cluster_resources().get("CPU", 0)
    ours = application_schema(with_default_routers(config, cpus), name, route_prefix)
    earlier = _messages(name)
    _apply([*_others(name), ours])
    _wait_until_running(name, earlier, show)
    _get_global_client().wait_for_proxies_serving(wait_for_applications_running=True)


def check_start(messages: Mapping[str, str]) -> None:
    """Raises the ModelError or ConfigError of a replica's start, if Serve's `messages` (by deployment) contain one."""
    for message in messages.values():
        if (raised := last_error(message)) is not None and raised[0] in PERMANENT:
            raise PERMANENT[raised[0]](raised[1])


def start_failure(messages: Mapping[str, str]) -> StartError:
    """Returns the error for an abandoned start, with the last cause in Serve's messages."""
    raised = {deployment: last_error(message) for deployment, message in messages.items()}
    causes = {deployment: error[1] for deployment, error in raised.items() if error is not None} or {
        deployment: message.strip().rpartition("\n")[2] for deployment, message in messages.items()
    }
    reasons = "; ".join(f"{deployment}: {cause}" for deployment, cause in causes.items())
    return StartError(f"the application did not start: {reasons or 'Serve names no cause'}")


def last_error(message: str) -> tuple[str, str] | None:
    """Returns the name and message of the last project error in a traceback, if any."""
    matches = list(ERROR_NAME.finditer(message))
    if not matches:
        return None
    text = message[matches[-1].end() :].strip().partition("\n\n")[0]
    return matches[-1][1], text


def withdraw(name: str) -> None:
    """Removes the application permanently: a restarted controller does not restore it.

    Waits until its replicas have drained; Serve kills those that exceed their drain time.
    """
    _apply(_others(name))  # before the wait, which may be interrupted
    serve.delete(name, _blocking=False)
    while name in serve.status().applications:
        time.sleep(POLL_S)


def application_schema(config: SlipstreamConfig, name: str, route_prefix: str) -> ServeApplicationSchema:
    """Returns an application's entry for a `serve deploy` file."""
    return ServeApplicationSchema.model_validate(application(config, name, route_prefix))


def is_running() -> bool:
    """Returns whether Serve runs on the connected cluster."""
    return _get_global_client(raise_if_no_controller_running=False) is not None


def serve_details() -> dict[str, Any]:
    """Returns Serve's details: its state, proxies and applications."""
    details: dict[str, Any] = _get_global_client().get_serve_details()
    return details


def progress_line(messages: Mapping[str, str]) -> str:
    """Returns the first line of each deployment's message, such as why a replica is not scheduled."""
    return "; ".join(text.strip().partition("\n")[0] for one, text in messages.items() if one != APPLICATION_KEY)


def step_text(step: str, line: str) -> str:
    """Returns the status line of a startup step, with Serve's messages if there are any."""
    return escape(f"{step}: {line}" if line else step)


def _wait_until_running(name: str, earlier: Mapping[str, str], show: Callable[[str], None]) -> None:
    """Waits for an application; `earlier` holds its deployments' messages before this start."""
    while True:
        status = serve.status().applications[name].status
        messages = {one: text for one, text in _messages(name).items() if text and earlier.get(one) != text}
        check_start(messages)
        if status is ApplicationStatus.RUNNING:
            return
        if status is ApplicationStatus.DEPLOY_FAILED:
            raise start_failure(messages)
        show(progress_line(messages))
        time.sleep(POLL_S)


def _messages(name: str) -> dict[str, str]:
    """Returns Serve's messages by deployment, and for the whole application."""
    overview = serve.status().applications.get(name)
    if overview is None:
        return {}
    return {APPLICATION_KEY: overview.message} | {one: status.message for one, status in overview.deployments.items()}


def _apply(applications: list[ServeApplicationSchema]) -> None:
    """Passes all applications to Serve at once, because Serve deletes declared applications that a call omits."""
    capacity = serve_details().get("target_capacity")
    _get_global_client().deploy_apps(ServeDeploySchema(applications=applications, target_capacity=capacity))


def _others(name: str) -> list[ServeApplicationSchema]:
    """Returns the other declared applications of the cluster."""
    deployed = {other: one.get("deployed_app_config") for other, one in serve_details()["applications"].items()}
    return [ServeApplicationSchema.model_validate(data) for other, data in deployed.items() if data and other != name]
