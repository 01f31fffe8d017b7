"""Stories of this folder's tests: contained errors are expected, so they are not logged."""

import logging

import pytest


@pytest.fixture(autouse=True)
def _unlogged():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def play(tmp_path):
    """Runs a story on a cluster of two replicas, and looks for leftovers after it."""
    from virtual_cluster import play

    return lambda story, **sizes: play(story, tmp_path, **sizes)


@pytest.fixture(scope="session", autouse=True)
def _pinned(a_core_each):
    """Two processes of this folder's tests run side by side."""
