"""Which tests pytest-xdist runs in one process, and in which order: live ones of a folder, which share a service.

Pure tests and those of engines and trainers share one with the tests of their file, so that what these keep is made
once. What takes longest starts first, so that no core waits for it in the end. xdist's own groups rename tests, which
pytest 9 no longer heeds. Used by conftest.py for `--dist loadgroup`.
"""

from xdist.scheduler import LoadScopeScheduling

OVER_HTTP = (
    *("gateway", "gateway_abuse", "gateway_compatible"),
    *("http_client", "trajectories", "transcripts", "vllm_protocol"),
)
TOGETHER = {
    "gpu": "gpu",
    "house": "house",
    "policies/test_laws.py": "laws",
    "policies/test_kv_laws.py": "laws",
    **{f"simulated/test_{name}.py": "simulated gateway" for name in OVER_HTTP},
}
"""Files and folders of one process: they have one GPU, the same trees of all files, the same plays, or import vLLM's
protocol, which takes seconds.
"""

BY_FILE = ("engines", "trainers", "simulated")
LARGE = ("deployed", "drafter", "elastic")
"""Folders of large services, one after the other: an engine with its KV takes 4 GB."""

SECONDS = {
    "house": 60,
    "deployments/test_fused_kernel.py": 40,
    "lab/test_sim_training.py": 40,
    "lab/test_plan.py": 20,
    "lab/test_simulate.py": 20,
    "laws": 20,
    "lab/test_bench_turns.py": 15,
    "lab/test_sim_turns.py": 15,
    "simulated/test_fuzz.py": 120,
    "simulated gateway": 80,
    "simulated/test_worlds.py": 50,
    "simulated/test_fuzz_at_law.py": 20,
    "test_tls.py": 1000,  # half of its 35 s are waits, which the longest ones fill
    "large": 600,
    "gateway": 400,
    "small": 170,
    "test_serve.py": 90,
    "test_gpu_check_live.py": 30,
    "engines/test_engine_faults.py": 70,
    "engines/test_image_processing.py": 50,
    "trainers/test_modes.py": 50,
    "trainers/test_publish.py": 40,
    "engines/test_engine_fuzz_live.py": 37,
    "trainers/test_processes.py": 35,
    "engines/test_prompts.py": 31,
    "trainers/test_async_trajectories.py": 30,
    "engines/test_sampler_v2.py": 27,
    "engines/test_engine_v2.py": 25,
    "engines/test_redraws.py": 25,
    "engines/test_routed_experts.py": 23,
    "engines/test_constraints.py": 23,
    "engines/test_windowed_engine.py": 20,
    "engines/test_dialects.py": 20,
    "engines/test_drafting.py": 20,
    "engines/test_device_engine.py": 17,
    "engines/test_distill_live.py": 15,
    "engines/test_engine_features.py": 15,
}
"""Of processes that take 15 s or more on an idle core. Their order matters alone."""


def process_of(nodeid: str) -> str:
    """The folder below tests/live, or the file; see TOGETHER."""
    _, room, *rest = nodeid.partition("::")[0].split("/")
    if room != "live":
        file = "/".join((room, *rest))
        return TOGETHER.get(room) or TOGETHER.get(file, file)
    if rest[0] in BY_FILE:
        return TOGETHER.get("/".join(rest), "/".join(rest))
    return "large" if rest[0] in LARGE else rest[0]


class FolderScheduling(LoadScopeScheduling):
    """Gives a process all tests of a folder, and the next folder once two of them are left."""

    def _split_scope(self, nodeid: str) -> str:
        return process_of(nodeid)

    def _assign_work_unit(self, node) -> None:
        longest = max(self.workqueue, key=lambda process: SECONDS.get(process, 0))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
