"""Real ranks over gloo publish what they hold: pieces are the whole to the bit, and a killed rank costs one version."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tailrace.deployments.staging.slots import Slots, memory_source
from tailrace.deployments.staging.stage import Stage
from trainers.publication_server import PublicationServer
from trainers.publishing_rank import Ranks, main

DEATHS = {
    (1, "before"): "rank 1 has not joined within 3 s",
    (0, "before"): "rank 0 has not joined within 3 s",
    (1, "manifest"): "rank 1 has not staged within 15 s",
    (0, "staging"): "rank 0 has not staged within 15 s",
    (0, "staged"): "rank 0 has not sealed within 15 s",
    (1, "staged"): "",
}
"""Why the service refuses the version, by the rank that dies and its phase; empty where that rank is needed no more."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["trainers.publishing_rank"])


@pytest.fixture(scope="module", autouse=True)
def path_of_the_process_that_forks():
    """It is started with the environment alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        yield


class RunningRanks:
    """The ranks of one trainer, which run from here on. `death`: see `Ranks`."""

    def __init__(self, server: PublicationServer, root: Path, layouts: str, world: int, death=None):
        self.server, self.root = server, root
        self._ranks = Ranks(world, server.address, root, tuple(layouts.split(",")), death)
        self._processes = [FORKS.Process(target=main, args=(self._ranks, rank)) for rank in range(world)]
        for one in self._processes:
            one.start()

    def said(self) -> list[str]:
        """What each rank has said in the end; empty for one that was killed. None hangs."""
        try:
            for one in self._processes:
                one.join(240)
                assert one.exitcode is not None, "it hangs"
        finally:
            self.kill()
        paths = map(self._ranks.said, range(self._ranks.world))
        return [path.read_text().strip() if path.exists() else "" for path in paths]

    def kill(self) -> None:
        for one in self._processes:
            one.kill()


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    """Two ranks for each death, all at once, since most wait for a limit in full."""
    found = {}
    for death in DEATHS:
        found[death] = RunningRanks(PublicationServer(), tmp_path_factory.mktemp("death"), "fsdp", 2, death)
    yield found
    for ranks in found.values():
        ranks.kill()


def digest_of(tensors: dict, root) -> str:
    stage = Stage(Slots("one-process", root), 1, (0, ""))
    for name, tensor in tensors.items():
        stage.add(name, tensor)
    return stage.seal().digest


@pytest.mark.parametrize(
    ("world", "layouts"), [(2, "fsdp,tensor,slices,experts"), (4, "fsdp,both,hybrid,columns,experts")]
)
def test_the_pieces_of_all_ranks_are_the_whole_to_the_bit(tmp_path, world, layouts):
    server = PublicationServer()
    said = RunningRanks(server, tmp_path, layouts, world).said()
    assert len(set(said)) == 1, said
    for number, (layout, line) in enumerate(zip(layouts.split(","), said[0].splitlines(), strict=True), 1):
        digest = digest_of(load_file(tmp_path / f"{layout}.safetensors"), tmp_path)
        assert line == f"loaded {number} {digest}", layout
    assert [memory_source(source).version for _, source in server.loads] == list(range(1, 1 + len(server.loads)))


@pytest.mark.parametrize(("rank", "phase"), DEATHS)
def test_a_killed_rank_ends_its_version_by_name_or_is_needed_no_more(deaths, rank, phase):
    ranks, reason = deaths[rank, phase], DEATHS[rank, phase]
    said, loads = ranks.said(), ranks.server.loads
    assert said[rank] == ""
    if not reason:
        assert said[1 - rank].startswith("loaded 1 ") and len(loads) == 1
        return
    assert said[1 - rank] == f"refused weights 1: {reason}; the service keeps its weights" and loads == []
    slots = Slots("app-0", ranks.root)
    assert slots.held() == {}
    Stage(slots, 2, (0, "")).drop()  # the way is free


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_while_engines_load_changes_nothing(tmp_path, rank):
    server = PublicationServer(lambda version: os.kill(server.pids[rank], signal.SIGKILL))
    said = RunningRanks(server, tmp_path, "fsdp", 2, (rank, "load")).said()
    assert said[rank] == "" and said[1 - rank].startswith("loaded 1 ")
