"""Which sites the next job of a run can count on: who comes and goes has to stay longer each time.

FLARE cannot add a site to a job. So a site that comes back costs everybody a new job, and one with a bad connection
could keep a run from its end.
"""

import time
from collections.abc import Collection

FIRST, LONGEST = 5.0, 600.0
"""Seconds that a site has to stay after it was gone once, and at most. Who stayed that long begins again with a clean
record."""


class Attendance:
    """Since when each site has been connected, and how often it was gone."""

    def __init__(self) -> None:
        self.since: dict[str, float] = {}
        self.gone: dict[str, int] = {}

    def see(self, connected: Collection[str]) -> None:
        """Note who is connected now."""
        now = time.monotonic()
        for name in self.since.keys() - set(connected):
            stayed = now - self.since.pop(name)
            self.gone[name] = 1 + (self.gone.get(name, 0) if stayed < LONGEST else 0)
        for name in connected:
            self.since.setdefault(name, now)

    def missed(self, name: str) -> None:
        """The site is connected, but could not take part."""
        self.gone[name] = self.gone.get(name, 0) + 1
        self.since[name] = time.monotonic()

    def forget(self) -> None:
        """The server stopped: nobody is connected, and it is nobody's fault."""
        self.since.clear()

    def steady(self, name: str) -> bool:
        """Whether a site is connected and likely to stay."""
        gone = self.gone.get(name, 0)
        needed = min(LONGEST, FIRST * 2.0 ** (gone - 1)) if gone else 0.0
        return name in self.since and time.monotonic() - self.since[name] >= needed

    def awaited(self, name: str) -> bool:
        """Whether it makes sense to wait for a site that is not steady now."""
        return self.gone.get(name, 0) < 3
