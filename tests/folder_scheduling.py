"""Which live tests pytest-xdist runs in one process, and in which order: those of a folder, which share a service.

Tests of engines and trainers share one with the tests of their file. What takes longest starts first, so that no core
waits for it in the end. xdist's own groups rename tests, which pytest 9 no longer heeds.
Used by conftest.py for `--dist loadgroup`.
"""

from xdist.scheduler import LoadScopeScheduling

LIVE = ("tests", "live")
BY_FILE = ("engines", "trainers")
LARGE = ("deployed", "drafter", "elastic")
"""Folders of large services, one after the other: an engine with its KV takes 4 GB."""

SECONDS = {
    "large": 600,
    "gateway": 400,
    "small": 180,
    "test_serve.py": 110,
    "trainers/test_modes.py": 110,
    "trainers/test_publish.py": 50,
    "engines/test_redraws.py": 60,
    "engines/test_windowed_engine.py": 45,
    "trainers/test_async_grpo.py": 45,
    "trainers/test_run.py": 40,
    "engines/test_sampler_v2.py": 40,
    "engines/test_constraints.py": 35,
    "trainers/test_attach.py": 35,
    "engines/test_engine_v2.py": 30,
    "engines/test_engine_fuzz_live.py": 30,
    "engines/test_weights.py": 25,
    "engines/test_drafting.py": 25,
    "engines/test_device_engine.py": 20,
    "engines/test_prompts.py": 20,
}
"""Of processes that take 20 s or more on an idle core. Their order matters alone."""


def process_of(nodeid: str) -> str:
    """The folder below tests/live, or the file there. All that is elsewhere, as the tests on a GPU, is one."""
    parts = nodeid.partition("::")[0].split("/")
    if tuple(parts[:2]) != LIVE:
        return "elsewhere"
    if parts[2] in BY_FILE:
        return "/".join(parts[2:])
    return "large" if parts[2] in LARGE else parts[2]


class FolderScheduling(LoadScopeScheduling):
    """Gives a process all tests of a folder, and the next folder once two of them are left."""

    def _split_scope(self, nodeid: str) -> str:
        return process_of(nodeid)

    def _assign_work_unit(self, node) -> None:
        longest = max(self.workqueue, key=lambda process: SECONDS.get(process, 0))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
