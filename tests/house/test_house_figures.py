"""Bounds on what scripts/house.py counts: definitions of one verb, collaborators of one object, files on the path."""

import re

import pytest
from test_imports import ROOT, nodes_of, tree_of

MAX_DEFINITIONS = 3
"""In `deployments`: the coordinator's call, its part that does it, and the engine's. It was 9."""

MAX_COLLABORATORS = 8
MAX_PATH_FILES = 20
MAX_PATH_LINES = 4_700

MAX_MOVES = {"tokens": 25, "logprobs": 4, "http": 60, "weights": 45}
"""Of the lists in docs/life_of_a_sample.md. A sample's tokens made 56 moves. A line in place of Ray gave HTTP 20."""


@pytest.fixture
def house(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import house

    monkeypatch.setattr(house, "nodes_of", lambda path: nodes_of(tree_of(path.relative_to(ROOT).as_posix())))
    return house


def test_a_verb_is_not_written_once_a_layer(house):
    every = house.definitions()
    inside = {verb: {file for file in files if file.startswith("deployments/")} for verb, files in every.items()}
    assert {verb: files for verb, files in inside.items() if len(files) > MAX_DEFINITIONS} == {}
    assert all(every.values()), "each verb is still one of the product's"


def test_no_constructor_has_more_collaborators(house):
    counts = house.constructors()
    assert {name: count for name, count in counts.items() if count > MAX_COLLABORATORS} == {}
    assert len(counts) > 100


def test_the_way_of_a_sample_stays_short(house):
    way = house.path()
    assert 10 < len(way) <= MAX_PATH_FILES and all(way.values())
    assert sum(way.values()) <= MAX_PATH_LINES


def test_the_moves_that_are_written_down_go_from_file_to_file(house):
    ways = house.ways()
    assert {name: one["moves"] for name, one in ways.items() if one["moves"] > MAX_MOVES[name]} == {}
    assert ways.keys() == MAX_MOVES.keys()
    known = {path.relative_to(ROOT).as_posix() for folder in house.PRODUCT for path in house.sources(folder)}
    page = (ROOT / "docs" / "life_of_a_sample.md").read_text()
    for text in re.findall(r"^```way \w+\n(.*?)^```", page, re.S | re.M):
        for name in {one.strip() for one in text.split(">")}:
            assert len([path for path in known if path.endswith(f"/{name}.py")]) == 1, name
