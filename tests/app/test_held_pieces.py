"""The pieces of a rank: whole tensors, slices, and what cannot be staged."""

import numpy as np
import pytest

from tailrace.app.weights.held_pieces import Slice, held_pieces
from tailrace.deployments.messages.pieces import TensorForm, TensorPiece
from tailrace.deployments.staging.stage import StageRefused

ROWS = np.ones((2, 3), np.float32)


def test_whole_tensors_and_slices_are_pieces_and_empty_shards_are_none():
    held = {"a": ROWS, "b": Slice(ROWS, (5, 3), (3, 0)), "c": Slice(ROWS[:0], (5, 3), (5, 0))}
    held["d"] = np.zeros((0, 2), "u1")
    assert [one.piece for one in held_pieces(held)] == [
        TensorPiece(TensorForm("a", "F32", (2, 3)), (0, 0), (2, 3)),
        TensorPiece(TensorForm("b", "F32", (5, 3)), (3, 0), (2, 3)),
        TensorPiece(TensorForm("d", "U8", (0, 2)), (0, 0), (0, 2)),
    ]


def test_a_model_s_tied_weights_count_once():
    import torch

    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    model.register_buffer("scale", torch.ones(1))
    assert sorted(one.piece.tensor.name for one in held_pieces(model)) == ["embed.weight", "scale"]


def test_names_are_those_of_the_model_without_what_is_put_around_it(tmp_path):
    import torch

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.compile(torch.nn.Linear(2, 2)))
        model = torch.compile(torch.nn.parallel.DistributedDataParallel(layers))
        names = sorted(one.piece.tensor.name for one in held_pieces(model))
    finally:
        torch.distributed.destroy_process_group()
    assert names == ["0.bias", "0.weight", "1.bias", "1.weight"]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Slice(ROWS, (6,), (0,)), "tensor a: a slice of [2, 3] at [0] is none of [6]"),
        (np.ones(2, np.complex64), "tensor a is a ndarray of complex64"),
    ],
)
def test_what_cannot_be_staged_is_named(value, reason):
    with pytest.raises(StageRefused) as refused:
        held_pieces({"a": value})
    assert str(refused.value) == reason
