"""How the pools are to scale, as target replicas tell it among their reports.

Arguments of a policy are part of what Serve takes for an application's version: other ones would replace every replica.
A replica that is told other settings goes on, and its next report has them.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from cluster.autoscaling.needs import DraftScaling, TargetScaling
from cluster.autoscaling.reports import tellers

Settings = Mapping[str, Mapping[str, float | None]]  # by pool and name
Scaling = TypeVar("Scaling", TargetScaling, DraftScaling)


def as_numbers(settings: Settings) -> dict[str, float]:
    """What a replica reports of them; a setting that is None is not among them."""
    named = {_name(pool, name): value for pool, one in settings.items() for name, value in one.items()}
    return {name: value for name, value in named.items() if value is not None}


def told(kind: type[Scaling], pool: str, metrics: Mapping[str, Mapping[Any, float]]) -> Scaling | None:
    """Of one pool, by values by name and replica; None while no replica has told all that are not None by default.

    While an update runs, replicas tell different ones, of which one's are as good as another's.
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
