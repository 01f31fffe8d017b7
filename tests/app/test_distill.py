"""What a draft model is cut from and taught on, and how its figures are reckoned; without any model."""

import json
from itertools import islice, pairwise

import pytest
import torch

from tailrace.app.cli import run
from tailrace.app.distill.acceptance import DistillAcceptance, acceptance
from tailrace.app.distill.layers import kept_layers
from tailrace.app.distill.teaching import AGAIN, Hint, divergence, lessons, share
from tailrace.app.distill.texts import read_texts
from tailrace.app.errors import BadInput


@pytest.mark.parametrize(("layers", "kept"), [(n, k) for n in (3, 4, 7, 30) for k in range(2, n)])
def test_layers_are_spread_evenly_from_the_first_to_the_last(layers, kept):
    places = kept_layers(layers, kept)
    gaps = {after - before for before, after in pairwise(places)}
    assert len(places) == kept and places[0] == 0 and places[-1] == layers - 1
    assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("kept", [0, 1, 4, 5])
def test_a_drafter_has_fewer_layers_and_two_at_least(kept):
    with pytest.raises(BadInput, match="the model has 4; give 2 to 3"):
        kept_layers(4, kept)


def distributions(seed, places=6, tokens=9, scale=2.0):
    chance = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(places, tokens, generator=chance)).log_softmax(1) for _ in range(2)]


@pytest.mark.parametrize("seed", range(3))
def test_shared_noise_accepts_as_often_as_its_law_says(seed):
    """P(both draw x) = 1 / sum_y max(p_y / p_x, q_y / q_x), the race of two rows over the same noise."""
    p, q = distributions(seed)
    found = acceptance(p, q, seed, draws=3000)
    a, b = p.exp().double(), q.exp().double()
    ratios = torch.maximum(a[:, None, :] / a[:, :, None], b[:, None, :] / b[:, :, None])
    assert found.shared == pytest.approx(float((1 / ratios.sum(2)).sum(1).mean()), abs=0.015)
    apart = 1 - found.independent
    assert (1 - apart) / (1 + apart) - 0.015 <= found.shared <= found.independent + 0.015


def test_a_drafter_that_says_what_the_target_says_is_always_right():
    p, q = distributions(0)
    same, other = acceptance(p, p, 0), acceptance(p, q, 0)
    assert same == (pytest.approx(0.0, abs=1e-6), 1.0, pytest.approx(1.0), 1.0)
    assert other.loss > 0 and other.independent < 1
    assert acceptance(p, q, 0) == other, "the same seed, the same figures"


@pytest.mark.parametrize("kept", [1, 4, 8, 9])
def test_what_a_hint_leaves_out_hides_some_of_the_divergence_and_adds_none(kept):
    p, q = distributions(3)
    found = divergence(Hint(*p.topk(kept)[::-1]), q)
    whole = (p.exp() * (p - q)).sum(1)
    assert (found <= whole + 1e-4).all() and (found >= -1e-5).all()
    assert kept < 9 or torch.allclose(found, whole, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("others", [3, 40, 100])
def test_some_tokens_stand_for_the_rest(others):
    """A softmax over a share of the vocabulary is right on average, and exact where the share is all."""
    p, q = distributions(4, tokens=60, scale=1.0)
    hint, chance = Hint(*p.topk(10)[::-1]), torch.Generator().manual_seed(0)
    found = []
    for _ in range(300):
        rows, offset, column = share(hint, 60, others, chance)
        assert torch.equal(rows[column[hint.tokens]], hint.tokens) and len(rows) == len(rows.unique())
        found.append((q[:, rows] + offset).exp().sum(1))
    assert torch.allclose(torch.stack(found).mean(0), torch.ones(len(q)), atol=0.05 if others < 40 else 1e-5)


def test_every_text_has_its_turn_and_then_all_come_again():
    texts = [f"text {n}" for n in range(40)]
    order = list(islice(lessons(texts, 1), 200))
    assert list(dict.fromkeys(order)) == texts, "new ones in their order"
    assert order[:: 1 + AGAIN][:40] == texts and order == list(islice(lessons(texts, 1), 200))


def test_a_mean_counts_places():
    parts = [(1, DistillAcceptance(4.0, 0.0, 0.0, 0.0)), (3, DistillAcceptance(0.0, 1.0, 1.0, 1.0))]
    assert DistillAcceptance.mean(parts) == (1.0, 0.75, 0.75, 0.75)


# ---- texts ---------------------------------------------------------------------------------------------


def ours(prompt, *answers):
    samples = [
        {"sample_index": i, "token_ids": tokens, "finish_reason": "stop", "segments": []}
        for i, tokens in enumerate(answers)
    ]
    return json.dumps({"prompt_id": f"p{prompt}", "prompt_token_ids": [prompt, 7], "samples": samples}) + "\n"


def write(path, count=20):
    path.write_text("".join(ours(prompt, [1, 2, 3], [4] * 40, []) for prompt in range(count)))
    return path


def test_no_prompt_is_both_taught_and_held_out(tmp_path):
    path = write(tmp_path / "out.jsonl")
    texts = read_texts([path], None, tokens=50, longest=16, seed=1)
    taught, held = ({text.tokens[: text.start] for text in part} for part in texts)
    assert len(taught) == 18 and len(held) == 2 and not taught & held
    assert len(texts.taught) == 36, "an empty answer teaches nothing"
    assert {len(text.tokens) for text in texts.taught} == {5, 16}, "cut, prompt included"
    assert read_texts([path], None, 50, 16, seed=1) == texts != read_texts([path], None, 50, 16, seed=2)


def test_a_trace_is_read_too(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"prompt_id": n, "prompt": "ab" * n, "epochs": [{"policy_step": 1, "samples": [{"text": "xyz"}]}]}
        for n in (1, 2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = read_texts([path], lambda text: [ord(letter) for letter in text], 1000, 16, 0)
    assert sorted(text.start for part in texts for text in part) == [2, 4]


@pytest.mark.parametrize(
    ("count", "tokens", "said"),
    [(1, 50, "two are needed"), (20, 6, "token 7 is not in the model's vocabulary")],
)
def test_rollouts_of_no_use_are_refused(tmp_path, count, tokens, said):
    path = write(tmp_path / "out.jsonl", count)
    with pytest.raises(BadInput, match=said) as refused:
        read_texts([path], None, tokens, 16, 0)
    assert str(path) in refused.value.message


def test_an_output_that_cannot_be_made_is_refused_before_the_model_is_loaded(tmp_path, capsys):
    rollouts = write(tmp_path / "out.jsonl")
    wrong = {tmp_path / "none" / "out": "its folder does not exist", rollouts: "is there already"}
    for out, said in wrong.items():
        code = run(["distill-drafter", "--model", str(tmp_path), "--rollouts", str(rollouts), "--out", str(out)])
        assert code == 2 and said in capsys.readouterr().err
