"""How near drafters are to targets, by the node and the zone that each is in."""

from collections import defaultdict
from collections.abc import Iterable

from cluster.routing.membership import Endpoint

SAME_NODE = 4.0  # sessions more that a drafter may have and still be the better one: what drafts come sooner
SAME_ZONE = 2.0


class Nearness:
    """Of the drafters that there are to the targets that there are."""

    def __init__(self) -> None:
        self._places: dict[str, Endpoint] = {}  # of targets, by address
        self._by_node: dict[str, list[str]] = {}  # addresses of drafters
        self._by_zone: dict[str, list[str]] = {}

    def follow(self, targets: Iterable[Endpoint], drafters: Iterable[Endpoint]) -> None:
        """Takes over what membership says; an empty node or zone is one that nobody knows."""
        by_node: defaultdict[str, list[str]] = defaultdict(list)
        by_zone: defaultdict[str, list[str]] = defaultdict(list)
        for drafter in drafters:
            by_node[drafter.node].append(drafter.address)
            by_zone[drafter.zone].append(drafter.address)
        self._places = {target.address: target for target in targets}
        self._by_node = {node: found for node, found in by_node.items() if node}
        self._by_zone = {zone: found for zone, found in by_zone.items() if zone}

    def worth(self, target: str | None) -> dict[str, float]:
        """By a drafter's address: how many sessions more it may have than another and still be the better one."""
        place = self._places.get(target or "")
        if place is None:
            return {}
        near = dict.fromkeys(self._by_zone.get(place.zone, ()), SAME_ZONE)
        return near | dict.fromkeys(self._by_node.get(place.node, ()), SAME_NODE)
