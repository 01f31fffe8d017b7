"""Shares of the ranks, and the folder in place of memory. In one process."""

from types import SimpleNamespace

import pytest
import tailrace_verl.weights
import torch
from safetensors.torch import load_file, save_file
from tailrace_verl.settings import Settings
from tailrace_verl.unsaved_tensors import unsaved_tensors
from tailrace_verl.weights import send, share_of
from tailrace_verl.weights_update import WeightsUpdate

TENSORS = {f"t{size}": torch.full((size,), float(size)) for size in (9, 1, 4, 7, 3, 2, 8)}


def test_every_tensor_is_in_one_share_and_shares_are_even():
    given = [dict.fromkeys(range(3), 0) for _ in range(3)]
    shares = [dict(share_of(TENSORS.items(), rank, given[rank])) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(TENSORS)
    sizes = [sum(map(len, share.values())) for share in shares]
    assert max(sizes) - min(sizes) < 9 and sum(sizes) == 34
    assert given == [{rank: 4 * size for rank, size in enumerate(sizes)}] * 3, "each rank counts the bytes of all"


def test_ranks_of_other_nodes_take_all_tensors_and_keep_none():
    tensors = iter(TENSORS.items())
    assert not list(share_of(tensors, 2, {0: 0, 1: 0})) and not list(tensors)


class Remote:
    """A handle of the server."""

    def __init__(self, update: WeightsUpdate):
        self._update, self.loads = update, []
        self.next_weights, self.load_weights = SimpleNamespace(remote=self._next), SimpleNamespace(remote=self._load)

    async def _next(self, global_steps):
        return self._update

    async def _load(self, version, folder):
        self.loads.append((version, folder))


async def test_with_weights_dir_the_first_rank_writes_a_folder(tmp_path, monkeypatch):
    server = Remote(WeightsUpdate(7, Settings(weights_dir=tmp_path), ("t9",)))
    monkeypatch.setattr(tailrace_verl.weights, "this_node", lambda: "one")
    monkeypatch.setattr(tailrace_verl.weights.ray, "get_actor", lambda name: server)
    assert await send(TENSORS.items(), 3) == {"tailrace/weights_version": 7}
    ((version, folder),) = server.loads
    assert version == 7 and load_file(f"{folder}/model-00000.safetensors").keys() == TENSORS.keys() - {"t9"}


@pytest.mark.parametrize("by_folder", [True, False])
async def test_a_rank_that_cannot_keep_a_tensor_gathers_to_the_end(tmp_path, monkeypatch, by_folder):
    class Unmovable(torch.Tensor):
        def detach(self):
            raise MemoryError("no memory is left")

    server = Remote(WeightsUpdate(7, Settings(weights_dir=tmp_path if by_folder else None), ()))
    monkeypatch.setattr(tailrace_verl.weights, "this_node", lambda: "one")
    monkeypatch.setattr(tailrace_verl.weights.ray, "get_actor", lambda name: server)
    monkeypatch.setattr(tailrace_verl.weights, "connect", lambda address, app_name: None)
    monkeypatch.setattr(tailrace_verl.weights, "begin", lambda version, held, client: list(held))
    tensors = iter({"first": torch.ones(1).as_subclass(Unmovable), **TENSORS}.items())
    with pytest.raises(MemoryError):
        await send(tensors, 3)
    assert not list(tensors), "the other ranks wait in the next gather"


@pytest.mark.parametrize(("rank", "fault"), [(0, "the service is gone"), (1, "its own error says why")])
async def test_no_rank_waits_for_a_first_one_that_got_no_version(monkeypatch, rank, fault):
    async def next_weights(global_steps):
        raise ValueError("the service is gone")

    gathered = []

    def all_gather_object(met, own):
        gathered.append(own)
        met[:] = [("one", None), own] if rank else [own, ("one", None)]

    server = SimpleNamespace(next_weights=SimpleNamespace(remote=next_weights))
    ranks = {"is_initialized": lambda: True, "get_rank": lambda: rank, "get_world_size": lambda: 2}
    group = SimpleNamespace(all_gather_object=all_gather_object, **ranks)
    monkeypatch.setattr(tailrace_verl.weights, "distributed", group)
    monkeypatch.setattr(tailrace_verl.weights, "this_node", lambda: "one")
    monkeypatch.setattr(tailrace_verl.weights.ray, "get_actor", lambda name: server)
    with pytest.raises((ValueError, RuntimeError), match=fault):
        await send(TENSORS.items(), 3)
    assert gathered == [("one", None)]


@pytest.mark.parametrize(("saved", "unsaved"), [("lm_head.weight", ()), ("other.weight", ("lm_head.weight",))])
def test_a_tied_head_is_sent_if_the_models_folder_has_it(tmp_path, saved, unsaved):
    assert unsaved_tensors(str(tmp_path / "somebody/model")) == ()
    save_file({saved: torch.ones(1)}, tmp_path / "model.safetensors")
    assert unsaved_tensors(str(tmp_path)) == unsaved
