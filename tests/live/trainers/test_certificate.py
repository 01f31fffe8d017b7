"""The certificate of learning, on a real service and a small model: equal to the bit, and a fault is found."""

import pytest

from tailrace.app.config import load_config, with_engine
from tailrace.lab.training_certificate.runs import measure, training


@pytest.mark.long
@pytest.mark.parametrize("backwards", [False, True])
def test_a_disturbed_training_has_the_bits_of_a_plain_one(tiny_model, backwards):
    settings = {"model": str(tiny_model), "kv_cache_gib": 0.5, "max_model_len": 256}
    config = training(str(tiny_model), steps=4, groups=3, samples=4, max_tokens=48)
    found = measure(with_engine(load_config(), settings), config, backwards, print)
    assert found["steps"] == 4 and found["runs"][1]["moved_samples"] > 0 and not found["lacks"], found
    assert found["ordered_steps"] == 4, "two gradients have no order"
    assert found["identical"] is not backwards
