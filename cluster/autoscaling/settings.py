"""Scaling settings of the pools, which target replicas send among their reports.

Serve counts a policy's arguments as part of the application's version, so changing them would replace every replica. A
replica that receives new settings keeps running, and its next report contains them.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from cluster.autoscaling.demand import DraftScaling, TargetScaling
from cluster.autoscaling.reports import tellers

Settings = Mapping[str, Mapping[str, float | None]]  # by pool and name
Scaling = TypeVar("Scaling", TargetScaling, DraftScaling)


def as_numbers(settings: Settings) -> dict[str, float]:
    """Returns the settings as metrics; leaves out those that are None."""
    named = {_name(pool, name): value for pool, one in settings.items() for name, value in one.items()}
    return {name: value for name, value in named.items() if value is not None}


def told(kind: type[Scaling], pool: str, metrics: Mapping[str, Mapping[Any, float]]) -> Scaling | None:
    """Returns the settings of one pool from metrics by name and replica.

    None until a replica has reported all settings that are not None by default. While an update runs, replicas report
    different settings, and any of them will do.
    """
    names = {field.name: _name(pool, field.name) for field in fields(kind)}
    always = [names[field.name] for field in fields(kind) if field.default is not None]
    replicas = tellers(always, metrics)
    if not replicas:
        return None
    arguments: dict[str, Any] = {field: metrics.get(name, {}).get(replicas[-1]) for field, name in names.items()}
    return kind(**arguments)


def _name(pool: str, name: str) -> str:
    return f"{pool}_{name}"
