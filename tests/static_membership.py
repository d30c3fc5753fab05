"""Fixed membership for tests."""

from cluster.routing.membership import Members


class StaticMembership:
    """Fixed list of members, for routers without Ray Serve."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def current(self) -> Members:
        return self._members
