"""Distance of drafters from targets, by node and zone."""

from collections import defaultdict
from collections.abc import Iterable

from cluster.routing.membership import Endpoint

SAME_NODE = 4.0  # extra sessions for which a drafter on the target's node is still preferred: its drafts arrive sooner
SAME_ZONE = 2.0


class Nearness:
    """Nearness of the current drafters to the current targets."""

    def __init__(self) -> None:
        self._places: dict[str, Endpoint] = {}  # targets, by address
        self._by_node: dict[str, list[str]] = {}  # addresses of drafters
        self._by_zone: dict[str, list[str]] = {}

    def follow(self, targets: Iterable[Endpoint], drafters: Iterable[Endpoint]) -> None:
        """Replaces the pools; an empty node or zone is unknown."""
        by_node: defaultdict[str, list[str]] = defaultdict(list)
        by_zone: defaultdict[str, list[str]] = defaultdict(list)
        for drafter in drafters:
            by_node[drafter.node].append(drafter.address)
            by_zone[drafter.zone].append(drafter.address)
        self._places = {target.address: target for target in targets}
        self._by_node = {node: found for node, found in by_node.items() if node}
        self._by_zone = {zone: found for zone, found in by_zone.items() if zone}

    def worth(self, target: str | None) -> dict[str, float]:
        """Returns, by drafter address, the extra sessions that a drafter may have and still be preferred for this
        target."""
        place = self._places.get(target or "")
        if place is None:
            return {}
        near = dict.fromkeys(self._by_zone.get(place.zone, ()), SAME_ZONE)
        return near | dict.fromkeys(self._by_node.get(place.node, ()), SAME_NODE)
