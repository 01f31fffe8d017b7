"""The order of an update's phases, and weights in memory: no replica is asked, and nothing is committed by halves."""

import asyncio

import pytest

from tailrace.deployments.coordinator.weight_transfer import WeightTransfer, backend_of
from tailrace.deployments.messages.rollout import Rejected

SOURCE = "memory:tailrace-1/5/0123456789abcdef"
OPENED = [("init", {"backend": "tailrace_memory"}), ("start", None)]


def run(*phases, transfer=None):
    """The answer to the last phase; a text that begins with `refused: ` for a refusal."""
    transfer = transfer or WeightTransfer(None, dict, lambda: (4, "digest"))

    async def all_of():
        return [await transfer.run(phase, info) for phase, info in phases]

    answer = asyncio.run(all_of())[-1]
    return f"refused: {answer.reason}" if isinstance(answer, Rejected) else answer


def test_weights_in_memory_are_named_by_a_part_and_given_by_finish():
    assert run(*OPENED, ("part", {"source": SOURCE}), ("finish", None)) == SOURCE


@pytest.mark.parametrize(
    ("phases", "reason"),
    [
        ([("start", None)], "start_weight_update before init_weight_transfer_engine"),
        ([OPENED[0], ("part", {"source": SOURCE})], "no weight update is open; call start_weight_update first"),
        ([OPENED[0], ("finish", None)], "no weight update is open; call start_weight_update first"),
        ([*OPENED, ("finish", None)], "finish_weight_update without update_weights"),
        ([*OPENED, ("part", {"names": []})], "update_info: source is None; the trainer engine tailrace_memory gives"),
        ([*OPENED, ("part", {"source": "/a/folder"})], "update_info: source is '/a/folder'"),
        ([*OPENED, ("part", {"source": "memory:../x"})], "weights memory:../x: not a name that `send_weights` makes"),
        ([*OPENED, ("part", {"source": SOURCE}), ("start", None), ("finish", None)], "without update_weights"),
        ([*OPENED, ("part", {"source": SOURCE}), OPENED[0], ("finish", None)], "no weight update is open"),
        ([*OPENED, ("shutdown", None), ("start", None)], "before init_weight_transfer_engine"),
        ([("init", {"colour": 1})], "init_info: no transfer engine has colour; known: nccl, ipc, tailrace_memory"),
        ([("init", {"colour": 1}), ("start", None)], "before init_weight_transfer_engine"),
        ([("init", {"backend": "tin"})], "init_info: backend 'tin' is not known; tailrace_memory is"),
        ([("init", {"packed": True})], "the replicas are not those that `init` found: 0 now; init again"),
    ],
)
def test_a_phase_out_of_order_is_refused_in_one_line(phases, reason):
    answer = run(*phases)
    assert answer.startswith("refused: ") and reason in answer and "\n" not in answer


def test_an_update_that_has_ended_is_not_committed_again():
    transfer = WeightTransfer(None, dict, lambda: (4, "digest"))
    assert run(*OPENED, ("part", {"source": SOURCE}), ("finish", None), transfer=transfer) == SOURCE
    assert run(("finish", None), transfer=transfer).startswith("refused: no weight update is open")
    assert run(("start", None), ("part", {"source": SOURCE}), ("finish", None), transfer=transfer) == SOURCE


def test_vllms_trainer_engines_are_known_by_their_info():
    meeting = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 3}
    assert backend_of(meeting) == ("nccl", meeting) and backend_of(None) == ("ipc", {})
    assert backend_of({"packed": True}) == ("ipc", {"packed": True})
