"""The draft ladder: what its curves say of random acceptance, and that written rungs are theirs."""

import json

import numpy as np
import pytest

from tailrace.app.cli import run
from tailrace.app.files.figures import PICTURE
from tailrace.app.files.output_file import OutputFile
from tailrace.lab.benchmarks.drafting.acceptance_profiles import profiles, rate
from tailrace.lab.benchmarks.drafting.drafts import RecordedRollouts
from tailrace.lab.benchmarks.drafting.ladder import RATES, Rung, ladders, model_method, rung
from tailrace.policies.families.racing import MethodProfile, MethodTable
from tailrace.policies.protocol.step_cost import StepCost

COST = StepCost((1, 16, 128), (0.010, 0.016, 0.080))
SMALL = StepCost((1, 16), (0.001, 0.002))
FREE = Rung("free", lambda samples, window: 0.0, (0.5, 0.7))
SLOW = Rung("slow", lambda samples, window: 0.2 * window, (0.9,))
MODEL = model_method(SMALL, 0.7)


@pytest.mark.parametrize("method", [FREE, SLOW, MODEL])
@pytest.mark.parametrize("samples", [1, 8])
def test_a_curve_is_what_accepting_at_random_comes_to(method, samples):
    """By play: rounds of the window that the rung has chosen, in which drafts are right by chance."""
    made, windows = rung(method, COST, samples, 8)
    chance = np.random.default_rng(5)
    for (p, gain), window in zip(made.curve, windows, strict=True):
        right = np.logical_and.accumulate(chance.random((20_000, window)) < p, axis=1).sum(axis=1)
        round_s = method.draft_s(samples, window) + float(COST.at(samples * (1 + window)))
        tokens_s = (1 + right).mean() / round_s
        assert gain == pytest.approx(tokens_s * float(COST.at(samples)), rel=0.03), p


@pytest.mark.parametrize("samples", [1, 8])
def test_better_drafts_gain_more_and_dearer_ones_less(samples):
    rungs = {method.name: rung(method, COST, samples, 8) for method in (FREE, SLOW, MODEL)}
    for made, windows in rungs.values():
        gains = [gain for _, gain in made.curve]
        assert gains == sorted(gains) and list(windows) == sorted(windows)
        assert [p for p, _ in made.curve] == list(RATES)
    free, model, slow = ([gain for _, gain in rungs[name][0].curve] for name in ("free", "model", "slow"))
    assert all(a >= b >= c for a, b, c in zip(free, model, slow, strict=True))


def table_of(found: dict) -> MethodTable:
    """The methods of one number of samples, as written."""
    return MethodTable(
        tuple(
            MethodProfile(row["method"], tuple(map(tuple, row["curve"])), tuple(row["profile"]))
            for row in found["rungs"]
        )
    )


def test_written_rungs_are_those_of_the_methods():
    methods = [FREE, SLOW, MODEL]
    written = json.loads(json.dumps(ladders(methods, COST, most_running=8, most=8)))["ladders"]
    assert set(written) == {"1", "8"}
    for samples, found in written.items():
        expected = MethodTable(tuple(rung(method, COST, int(samples), 8)[0] for method in methods))
        assert table_of(found) == expected
        assert found["first_choice"] == expected.first_choice()
    assert table_of(written["1"]).first_choice({"free": 0.1, "slow": 0.95, "model": 0.95}) == "model"


def test_where_no_method_pays_the_first_choice_is_none():
    found = ladders([SLOW], COST, 8, 8)["ladders"]
    assert [of["first_choice"] for of in found.values()] == [None, None]


def test_a_rate_is_the_chance_that_gives_the_same_tokens():
    chance = np.random.default_rng(2)
    for p in (0.2, 0.6, 0.9):
        right = np.logical_and.accumulate(chance.random((20_000, 8)) < p, axis=1).sum(axis=1)
        assert rate(int((1 + right).sum()), len(right)) == pytest.approx(p, abs=0.01)
    assert rate(5, 5) == 0.0 and rate(90, 10) == 1.0


def test_a_profile_tells_samples_apart():
    """One repeats its mates, the other nobody; look-ups that know the first are right in it alone."""
    chance = np.random.default_rng(0)
    prompt, text, other = (chance.integers(0, 500, size).astype(np.int32) for size in (8, 117, 117))
    rollouts = [RecordedRollouts(prompt, [text, other], [text] * 7, [])]
    found = profiles(rollouts, lambda tokens, most: text[len(tokens) - 8 :][:most], lambda said: None)
    assert set(found) == {"group", "ngram"}, "without earlier answers nothing is known of them"
    assert found["ngram"] == (1.0, pytest.approx(0.0, abs=0.05))
    assert found["group"][0] > 0.8 and found["group"][1] < 0.2


def test_a_picture_is_drawn(tmp_path):
    from tailrace.lab.benchmarks.drafting.ladder import picture

    picture(OutputFile(tmp_path / "ladder.png", "--plot", PICTURE), ladders([FREE, SLOW], COST, 8, 8))
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--acceptance", "ngram"), "give METHOD=RATE"),
        (("--acceptance", "oracle=0.5"), "methods are group, history, ngram, model"),
        (("--acceptance", "ngram=1.5"), "rates 0 to 1"),
        (("--plot", "ladder.txt"), "a path that ends in .png"),
        (("--out", "none/ladder.json"), "its folder does not exist"),
        (("--drafter", "."), "add --acceptance model=RATE"),
        (("--drafter-profile", "none.json"), "--drafter-profile none.json: nothing says"),
        (("--profile", "none.json"), "--profile none.json: not what"),
        (("--trace", "none.jsonl"), "none.jsonl: cannot be read"),
    ],
)
def test_bad_input_is_refused_before_an_engine_starts(arguments, said, capsys):
    assert run(["bench", "ladder", *arguments]) == 2
    assert said in capsys.readouterr().err
