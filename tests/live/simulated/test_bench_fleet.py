"""The prompts of `tailrace bench fleet`; its processes are in a test that takes longer."""

from tailrace.deployments.batches.prompts import Prepared
from tailrace.lab.benchmarks.control_plane.fleet_coordinator import FleetPrompts
from tailrace.lab.benchmarks.control_plane.fleet_load import young


def test_the_prompts_of_the_load_are_taken():
    prepared = FleetPrompts().prepare_group(young(1, 0)[0])
    assert isinstance(prepared, Prepared), prepared
