"""A membership that does not change."""

from cluster.routing.membership import Members


class StaticMembership:
    """A fixed list, as for routers without Ray Serve."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def current(self) -> Members:
        return self._members
