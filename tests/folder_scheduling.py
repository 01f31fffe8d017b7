"""Which live tests pytest-xdist runs in one process: those of a folder, which share a service.

xdist's own groups rename tests, which pytest 9 no longer heeds. Used by conftest.py for `--dist loadgroup`.
"""

from xdist.scheduler import LoadScopeScheduling

LIVE = ("tests", "live")
LARGE = ("deployed", "drafter", "elastic")
"""Folders whose services run the demo model, one after the other: an engine takes 4 GB."""


def process_of(nodeid: str) -> str:
    """The folder below tests/live, or the file there. All that is elsewhere, as the tests on a GPU, is one."""
    parts = nodeid.partition("::")[0].split("/")
    if tuple(parts[:2]) != LIVE:
        return "elsewhere"
    return "large" if parts[2] in LARGE else parts[2]


class FolderScheduling(LoadScopeScheduling):
    """Gives a process all tests of a folder, and the next folder once two of them are left."""

    def _split_scope(self, nodeid: str) -> str:
        return process_of(nodeid)
