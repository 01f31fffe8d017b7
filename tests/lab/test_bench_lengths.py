"""The benchmark of length policies: what it replays, what it reports, and that it can tell good from bad."""

import json

import numpy as np
import pytest

from tailrace.app.cli import run
from tailrace.app.errors import BadInput
from tailrace.lab.benchmarks.drafting import lengths
from tailrace.lab.benchmarks.drafting.lengths import RecordedGroup, measure, rank_correlation, read_batches
from tailrace.policies.families.registry import members

NAMES = {*members("lengths"), "always_max", "oracle"}
RIVALS = ("max_finished", "history_quantile", "length_class")


def line(name, *epochs) -> dict:
    """A trace's line whose texts have so many words."""
    return {
        "prompt_id": name,
        "prompt": "p",
        "epochs": [
            {"policy_step": n, "samples": [{"text": "w " * k} for k in words]} for n, words in enumerate(epochs)
        ],
    }


def words(text: str) -> int:
    return len(text.split())


def scattered(seed, prompts=30, samples=16, between=1.0) -> list[tuple[RecordedGroup, ...]]:
    """Log-normal lengths: `between` times as much spread between prompts as within one; and one epoch of history."""
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(prompts):
        mean = 5.0 + between * 0.5 * rng.standard_normal()
        now, past = (np.exp(mean + 0.5 * rng.standard_normal(samples)).astype(int) + 1 for _ in range(2))
        groups.append(RecordedGroup(tuple(now.tolist()), (tuple(past.tolist()),)))
    return [tuple(groups)]


def test_the_last_checkpoint_is_the_batch_and_the_others_are_its_history_newest_first():
    lines = [line("a", [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 300]), line("b", [1] * 4, [2] * 4, [3] * 5)]
    batches = read_batches(lines, words, samples=2, max_tokens=100)
    assert batches == [
        (RecordedGroup((9, 10), ((5, 6), (1, 2))), RecordedGroup((3, 3), ((2, 2), (1, 1)))),
        (RecordedGroup((11, 100), ((7, 8), (3, 4))), RecordedGroup((3, 3), ((2, 2), (1, 1)))),
    ]


@pytest.mark.parametrize("epochs", [[], [[1] * 20, [1] * 3]])
def test_a_prompt_with_too_few_samples_is_named(epochs):
    with pytest.raises(BadInput, match=r"^b: \d samples in its last checkpoint"):
        read_batches([line("a", [1] * 16), line("b", *epochs)], words, samples=16, max_tokens=100)


@pytest.mark.slow
def test_every_policy_at_every_moment_and_the_oracle_is_right():
    result = measure(scattered(0, prompts=10), max_tokens=4096)
    for table in ("policies", "without_history"):
        assert set(result[table]) == NAMES
        for moments in result[table].values():
            assert set(moments["after_mates"]) == {"0", "1", "4", "8"} and set(moments["at_share"]) == {
                "25",
                "50",
                "75",
            }
            for score in (*moments["after_mates"].values(), *moments["at_share"].values()):
                assert -1 <= score["rank_correlation"] <= 1 and 0 <= score["class_accuracy"] <= 1
        assert all(
            score == {"rank_correlation": 1.0, "class_accuracy": 1.0} for score in scores(result[table]["oracle"])
        )
        assert all(score["rank_correlation"] == 0 for score in scores(result[table]["always_max"]))
    assert sum(result["class_shares"].values()) == pytest.approx(1, abs=1e-3)


def scores(moments) -> list[dict]:
    return [*moments["after_mates"].values(), *moments["at_share"].values()]


def measure_only(monkeypatch, *names: str) -> None:
    """The other policies take most of the time, and are not looked at."""
    monkeypatch.setattr(lengths, "members", lambda family: {name: members(family)[name] for name in names})


@pytest.mark.slow
def test_where_prompts_differ_history_tells_and_mates_tell_more(monkeypatch):
    """Mean over four batches: our estimate is no worse than Seer's or a quantile, and grows with what is known."""
    measure_only(monkeypatch, "shrunk", *RIVALS)
    results = [measure(scattered(seed), max_tokens=4096) for seed in range(4)]

    def mean(name, kind, moment, table="policies"):
        return np.mean([result[table][name][kind][moment]["rank_correlation"] for result in results])

    for kind, moment in (("after_mates", "0"), ("after_mates", "8"), ("at_share", "50"), ("at_share", "75")):
        for rival in RIVALS:
            assert mean("shrunk", kind, moment) > mean(rival, kind, moment) - 0.01, (rival, kind, moment)
    fresh = [mean("shrunk", "after_mates", mates, "without_history") for mates in ("0", "1", "4", "8")]
    assert fresh == sorted(fresh) and fresh[0] == 0 and fresh[-1] > 0.5


def test_nobody_left_to_guess_is_no_number():
    """Answers of one token: after a quarter of them all have ended."""
    result = measure([(RecordedGroup((1,) * 16, ()),)], max_tokens=64)
    assert result["policies"]["shrunk"]["at_share"]["25"] == {"rank_correlation": 0.0, "class_accuracy": None}


def test_where_prompts_do_not_differ_nobody_claims_to_know(monkeypatch):
    measure_only(monkeypatch, "shrunk")
    results = [measure(scattered(seed, between=0.0), max_tokens=4096) for seed in range(4)]
    found = [result["policies"]["shrunk"]["after_mates"]["8"]["rank_correlation"] for result in results]
    assert abs(np.mean(found)) < 0.1


def test_a_rank_correlation_is_spearman_s():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 12, 40), rng.integers(0, 12, 40)
        assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0 and rank_correlation([], []) == 0


def test_the_command_prints_one_object(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    lines = [line(name, list(range(5, 21)), list(range(25, 41))) for name in ("a", "b")]
    trace.write_text("".join(json.dumps(item) + "\n" for item in lines))
    assert run(["bench", "lengths", "--trace", str(trace), "--max-tokens", "64", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["samples"] == 16 and result["prompts"] == 2 and set(result["policies"]) == NAMES


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--samples", "17"], "a: 16 samples in its last checkpoint"), (["--samples", "8"], "--samples"),
     (["--tokenizer", "/no/such/folder"], "/no/such/folder")],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path, capsys, options, said):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(line("a", [3] * 16)) + "\n")
    assert run(["bench", "lengths", "--trace", str(trace), *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
