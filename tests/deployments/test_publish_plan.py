"""The plan of a publication: every value is written once, by a rank that holds it, or a line names what is wrong."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.deployments.messages.pieces import PieceEnd, StagedPiece, TensorForm, TensorPiece
from tailrace.deployments.staging.piece_files import PieceFiles, PieceRuns, checksum_of_piece
from tailrace.deployments.staging.publish_plan import plans_of
from tailrace.deployments.staging.slots import Slots
from tailrace.deployments.staging.stage import Stage, StageRefused

FORM = TensorForm("a", "F32", (4, 6))
ODD = TensorForm("b", "U8", (5,))


def box(form, start, extent) -> TensorPiece:
    return TensorPiece(form, start, extent)


def whole(form) -> TensorPiece:
    return TensorPiece(form, (0,) * len(form.shape), form.shape)


def test_shards_are_written_by_their_ranks_and_replicas_once_where_least_is_written():
    parts = {
        0: (box(FORM, (0, 0), (3, 6)), whole(ODD)),
        1: (box(FORM, (3, 0), (1, 6)), whole(ODD)),
        2: (whole(ODD),),
    }
    plans = plans_of(parts)
    assert {rank: plan.written for rank, plan in plans.items()} == {0: (0,), 1: (0,), 2: (0,)}
    assert {plan.tensors for plan in plans.values()} == {(FORM, ODD)}, "the larger items first: no gaps"


def test_a_rank_of_another_node_writes_what_no_rank_of_the_stage_s_node_has():
    parts = {0: (box(FORM, (0, 0), (3, 6)),), 1: (box(FORM, (3, 0), (1, 6)), whole(ODD)), 2: (whole(ODD),)}
    plans = plans_of(parts, away={1})
    assert [(plans[rank].written, plans[rank].ships) for rank in parts] == [((0,), False), ((0,), True), ((0,), False)]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({0: ()}, "no rank has a tensor"),
        (
            {0: (whole(FORM),), 1: (whole(TensorForm("a", "BF16", (4, 6))),)},
            "rank 1 has a as BF16 [4, 6], rank 0 as F32 [4, 6]",
        ),
        (
            {0: (whole(FORM),), 3: (whole(TensorForm("a", "F32", (6, 4))),)},
            "rank 3 has a as F32 [6, 4], rank 0 as F32 [4, 6]",
        ),
        (
            {0: (box(FORM, (0, 0), (3, 6)),), 1: (box(FORM, (2, 0), (2, 6)),)},
            "rank 0 and rank 1 hold different pieces of a that overlap",
        ),
        ({0: (box(FORM, (0, 0), (3, 6)),)}, "no rank holds 6 of the 24 values of a"),
        ({0: (box(FORM, (2, 0), (3, 6)),)}, "rank 0 has a piece of a outside of [4, 6]"),
        ({0: (box(FORM, (-1, 0), (3, 6)),)}, "rank 0 has a piece of a outside of [4, 6]"),
    ],
)
def test_pieces_that_do_not_make_a_whole_are_named(parts, reason):
    with pytest.raises(ValueError) as refused:
        plans_of(parts)
    assert str(refused.value) == reason


@pytest.mark.slow
@given(st.data())
def test_pieces_written_by_any_ranks_are_the_whole_to_the_bit(tmp_path_factory, data):
    shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    arrays = {
        f"t{number}": np.arange(np.prod(shape, dtype=int), dtype=kind).reshape(shape) + 1
        for number, (shape, kind) in enumerate(
            data.draw(st.lists(st.tuples(shapes, st.sampled_from(["u1", "f4", "f2", "i8"])), min_size=1, max_size=4))
        )
    }
    ranks = data.draw(st.integers(1, 4))
    parts = {rank: [] for rank in range(ranks)}
    for name, array in arrays.items():
        cuts = [
            sorted(data.draw(st.sets(st.integers(1, max(1, side - 1)), max_size=2)) - {side}) for side in array.shape
        ]
        spans = [list(zip([0, *cut], [*cut, side], strict=True)) for cut, side in zip(cuts, array.shape, strict=True)]
        form = TensorForm(name, {"u1": "U8", "f4": "F32", "f2": "F16", "i8": "I64"}[array.dtype.str[1:]], array.shape)
        for part in product(*spans):
            piece = TensorPiece(form, tuple(begin for begin, _ in part), tuple(end - begin for begin, end in part))
            for rank in data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                parts[rank].append(piece)
    slots = Slots("app", tmp_path_factory.mktemp("pieces"))
    plans = plans_of({rank: tuple(pieces) for rank, pieces in parts.items()})
    size = data.draw(st.integers(1, 100), "bytes of a write")
    assert published(slots, arrays, parts, plans, size) == staged(slots, arrays), "the same name as from one process"


def published(slots, arrays, parts, plans, size) -> str:
    stage, made = Stage(slots, 1, (0, "")), []
    stage.lay(plans[0].tensors)
    for rank, plan in plans.items():
        files = PieceFiles(slots.part, plan.tensors)
        for place in plan.written:
            piece = parts[rank][place]
            index = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.extent, strict=True))
            values = np.ascontiguousarray(arrays[piece.tensor.name][index]).reshape(-1).view(np.uint8)
            for begin in range(0, len(values), size):
                files.write(piece, memoryview(values)[begin : begin + size], begin)
            made.append(StagedPiece(rank, piece, PieceEnd(checksum_of_piece(piece, memoryview(values)))))
        files.close()
    return stage.seal(made).digest


def staged(slots, arrays) -> str:
    stage = Stage(slots, 2, (0, ""))
    for name, array in arrays.items():
        stage.add(name, array)
    return stage.seal().digest


@pytest.mark.parametrize(
    ("piece", "size", "offsets"),
    [
        (whole(FORM), 96, [0]),
        (box(FORM, (1, 0), (2, 6)), 48, [24]),
        (box(FORM, (1, 2), (2, 3)), 12, [32, 56]),
        (box(TensorForm("c", "U8", (2, 3, 4)), (0, 1, 0), (2, 2, 4)), 8, [4, 16]),
        (box(TensorForm("c", "U8", (2, 3, 4)), (0, 1, 1), (2, 2, 2)), 2, [5, 9, 17, 21]),
        (box(TensorForm("d", "F32", ()), (), ()), 4, [0]),
        (box(FORM, (4, 0), (0, 3)), 12, []),
    ],
)
def test_a_piece_is_runs_of_equal_length(piece, size, offsets):
    runs = PieceRuns(piece)
    assert (runs.size, list(runs), len(runs)) == (size, offsets, len(offsets))


@pytest.mark.parametrize(
    ("pieces", "named"),
    [((box(FORM, (0, 0), (4, 2)), box(FORM, (0, 2), (4, 4))), "rank 1: a from [0, 2]"), ((whole(FORM),), "rank 0: a")],
)
def test_a_piece_with_other_bytes_than_its_rank_had_is_named(tmp_path, pieces, named):
    slots = Slots("app", tmp_path)
    stage = Stage(slots, 1, (0, ""))
    stage.lay((FORM,))
    files, made = PieceFiles(slots.part, (FORM,)), []
    for rank, piece in enumerate(pieces):
        data = memoryview(bytes(4 * piece.values))
        files.write(piece, data)
        made.append(StagedPiece(rank, piece, PieceEnd(checksum_of_piece(piece, data))))
    files.write(pieces[-1], memoryview(b"\1" * (4 * pieces[-1].values)))
    with pytest.raises(StageRefused) as refused:
        stage.seal(made)
    assert str(refused.value) == f"{named} is staged with other bytes"
    stage.drop()
    assert slots.held() == {} and not slots.part.exists()
