"""Tests Serve's input for a configuration, and errors extracted from messages about failed starts."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from cluster.config import validated
from cluster.errors import ConfigError, ModelError
from serve_app.operations import deploying
from serve_app.operations.deploying import (
    application_schema,
    check_start,
    deploy,
    start_failure,
    step_text,
    withdraw,
)


def test_the_autoscaling_policy_sees_both_pools() -> None:
    config = validated(
        {
            "model": {"target": "owner/target"},
            "target": {"replicas": {"max": 3, "first_token_s": 1.5}},
            "draft": {"method": "suffix", "replicas": {"min": 0}, "resources": {"cpu_affinity": [1]}},
        }
    )
    schema = application_schema(config, "ours", "/ours")
    assert [one.name for one in schema.deployments] == ["Target", "Drafter", "Router"]
    assert schema.autoscaling_policy == {"policy_function": "cluster.autoscaling:PoolsPolicy"}
    assert (schema.name, schema.route_prefix, schema.import_path) == ("ours", "/ours", "serve_app.app:build")


REPLICA = (
    "A replica failed to start with exception. Retrying 2 more time(s). Error:\n"
    "\x1b[36mray::ServeReplica:slipstream:Target.initialize_and_get_metadata()\x1b[39m (pid=7, ip=10.0.0.1)\n"
    '  File "serve_app/startup.py", line 46, in start_target\n'
)
NESTED = (
    REPLICA + "cluster.errors.EngineError: an earlier cause\n\nThe above exception was the direct cause of:\n\n"
    "ray.exceptions.RayTaskError(ModelError): \x1b[36mray::Rank.load()\x1b[39m (pid=8)\n"
    '    raise ModelError("...")\n'
    "cluster.errors.ModelError: tensor model.norm.weight holds NaN; fetch the checkpoint again"
)


def test_a_refused_model_ends_startup_with_its_message() -> None:
    with pytest.raises(ModelError) as refusal:
        check_start({"application": "", "Router": "1 replicas that have taken more than 30s", "Target": NESTED})
    assert str(refusal.value) == "tensor model.norm.weight holds NaN; fetch the checkpoint again"


def test_a_refused_configuration_ends_startup() -> None:
    with pytest.raises(ConfigError, match=r"^server\.port: taken$"):
        check_start({"Router": REPLICA + "cluster.errors.ConfigError: server.port: taken"})


def test_transient_failures_are_left_to_serves_retries() -> None:
    check_start({"Target": REPLICA + "cluster.errors.EngineError: the model was not loaded within 9 s", "Drafter": ""})


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        (
            {
                "application": "Failed to update the deployments ['Target'].",
                "Target": REPLICA + "cluster.errors.EngineError: the model was not loaded within 9 s",
            },
            "Target: the model was not loaded within 9 s",
        ),
        (
            {"Target": REPLICA + "torch.OutOfMemoryError: CUDA out of memory"},
            "Target: torch.OutOfMemoryError: CUDA out of memory",
        ),
        ({}, "Serve names no cause"),
    ],
    ids=["own", "another library's", "none"],
)
def test_a_start_that_serve_abandons_ends_with_the_cause(messages: dict[str, str], cause: str) -> None:
    assert str(start_failure(messages)) == f"the application did not start: {cause}"


class SlowServe:
    """Fake Serve with one application, whose deletion takes longer than Serve's own wait."""

    def __init__(self) -> None:
        self.declared = {"slipstream"}
        self.deleted: set[str] = set()
        self.polls_left = 3

    def get_serve_details(self) -> dict[str, Any]:
        schema = {"name": "slipstream", "import_path": "serve_app.app:build"}
        return {"applications": {"slipstream": {"deployed_app_config": schema}}}

    def deploy_apps(self, config: ServeDeploySchema) -> None:
        self.declared = {one.name for one in config.applications}

    def delete(self, name: str, _blocking: bool = True) -> None:
        self.deleted.add(name)
        if _blocking:
            raise TimeoutError

    def status(self) -> SimpleNamespace:
        self.polls_left -= 1
        return SimpleNamespace(applications={"slipstream": None} if self.polls_left else {})


def test_a_slow_removal_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowServe()
    monkeypatch.setattr(deploying, "_get_global_client", lambda: slow)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(serve, "delete", slow.delete)
    monkeypatch.setattr(serve, "status", slow.status)
    withdraw("slipstream")
    assert (slow.declared, slow.deleted, slow.polls_left) == (set(), {"slipstream"}, 0)


UNSCHEDULED = "Deployment 'Target' has 1 replicas that have taken more than 30s to be scheduled: {'GPU': 4.0}"


class StartingServe:
    """Fake Serve whose application runs after one poll with messages and one without."""

    def __init__(self) -> None:
        self.polls = 0

    def get_serve_details(self) -> dict[str, Any]:
        return {"applications": {}}

    def deploy_apps(self, config: ServeDeploySchema) -> None:
        pass

    def wait_for_proxies_serving(self, wait_for_applications_running: bool) -> None:
        pass

    def status(self) -> SimpleNamespace:
        self.polls += 1
        if self.polls == 1:
            return SimpleNamespace(applications={})  # before the deployment
        messages = {"Target": f"{UNSCHEDULED}\nmore", "Router": ""} if self.polls <= 3 else {"Target": ""}
        ours = SimpleNamespace(
            status=ApplicationStatus.RUNNING if self.polls >= 6 else ApplicationStatus.DEPLOYING,
            message="",
            deployments={name: SimpleNamespace(message=text) for name, text in messages.items()},
        )
        return SimpleNamespace(applications={"ours": ours})


def test_serves_messages_are_shown_while_replicas_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them, `up` would wait in silence for a replica that no node can hold."""
    starting = StartingServe()
    monkeypatch.setattr(deploying, "_get_global_client", lambda: starting)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(serve, "status", starting.status)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    shown: list[str] = []
    config = validated({"model": {"target": "owner/target"}, "draft": {"method": "ngram"}})
    deploy(config, "ours", show=shown.append)
    assert shown == [UNSCHEDULED, ""]
    assert step_text("Starting", "a [bold] message") == r"Starting: a \[bold] message"
    assert step_text("Starting", "") == "Starting"
