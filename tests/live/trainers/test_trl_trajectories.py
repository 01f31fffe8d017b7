"""TRL's `AsyncGRPOTrainer` on the trajectories of OpenAI's own client, against a gateway with real engines."""

from contextlib import aclosing

import httpx
import pytest
import torch
from gateway_service import TOKENS
from live.trainers.async_trainer import EXAMPLES, logged
from transformers import AutoModelForCausalLM

import tailrace
from tailrace.app.weights.over_http import HttpWeights
from tailrace.http import Client

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("on_a_cpu")]

STEPS, SAMPLES, SEED = 3, 4, 42


@pytest.fixture
def played(monkeypatch) -> dict:
    """Groups of trajectories as the client gave them to the worker, by their numbers, and what they asked for."""
    found, groups = {}, Client.trajectory_groups

    async def recorded(self, tasks, play, samples, **request):
        async with aclosing(groups(self, tasks, play, samples, **request)) as given:
            async for group in given:
                found[int(group.group)] = group, request
                yield group

    monkeypatch.setattr(Client, "trajectory_groups", recorded)
    return found


@pytest.fixture
def opened(monkeypatch) -> list:
    """Every trajectory that was opened."""
    found, open_one = [], Client.trajectory

    async def recorded(self, **request):
        found.append(await open_one(self, **request))
        return found[-1]

    monkeypatch.setattr(Client, "trajectory", recorded)
    return found


@pytest.fixture
def sent(monkeypatch) -> list:
    """The weights that the trainer has sent, by its versions less one."""
    found, send = [], tailrace.AsyncWeights.send_weights

    def recorded(self, iterator):
        found.append({name: tensor.clone() for name, tensor in iterator})
        send(self, iter(found[-1].items()))

    monkeypatch.setattr(tailrace.AsyncWeights, "send_weights", recorded)
    return found


@pytest.fixture
def drawn(monkeypatch) -> list:
    """Samples that the trainer has drawn, each with the version that it trained then."""
    found = []

    class Watched(tailrace.AsyncTrajectories):
        def _drawn(self, sample):
            found.append((sample, self._version))
            super()._drawn(sample)

    monkeypatch.setattr(tailrace, "AsyncTrajectories", Watched)
    return found


@pytest.fixture
def trainer(address, tiny_model, tmp_path, monkeypatch, played, opened, sent, drawn):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import trl_trajectories

    return trl_trajectories.main(address[0], TOKENS["trainer"], str(tiny_model), learning_rate=1e-3)


@torch.no_grad()
def logprobs_of(model, sample) -> list[float]:
    """The logprobs of a sample's trained tokens, by a model of Hugging Face."""
    tokens = torch.tensor(sample.input_ids)
    law = torch.log_softmax(model(tokens[None]).logits[0, :-1].double(), -1)
    found = law.gather(1, tokens[1:, None])[:, 0]
    return found[torch.tensor(sample.completion_mask[1:]).bool()].tolist()


def test_the_trainer_gets_what_engines_sampled_under_the_weights_that_it_sent(
    address, tiny_model, trainer, played, opened, sent, drawn
):
    url, client = address
    assert len(sent) == STEPS + 1, "before the first step, and after each"
    assert client.status_blocking().weights_version >= len(sent)
    # The rows of whole groups, in the order of the data set, and none twice.
    expected = [row for number in sorted(played) for one in played[number][0].trajectories for row in one.rows.rows]
    assert len(drawn) >= STEPS * 16
    for (sample, _), row in zip(drawn, expected, strict=False):
        assert sample.input_ids.tolist() == list(row.token_ids) and sample.completion_mask.tolist() == list(row.mask)
        trained = [turn for turn in row.turns if row.mask[turn.start]]
        assert sum(turn.end - turn.start for turn in trained) == sum(row.mask) <= 24
    for group, _ in played.values():
        for one in group.trajectories:
            assert one.error is None and (one.rows.turns, one.rows.branches, one.rows.reencoded_tokens) == (3, 1, 0)
            assert [sum(row.mask) for row in one.rows.rows] and len(one.rows.rows) == 2

    # Staleness as the trainer counted it.
    ages = [version - sample.model_version for sample, version in drawn]
    assert min(ages) == 0 and max(logged(trainer, "sample/staleness_max")) <= 1
    assert not logged(trainer, "sample/dropped_stale_total")
    assert logged(trainer, "ratio")[0] == pytest.approx(1, abs=1e-2)

    # Logprobs are those of the weights that each sample names, and of no others.
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    versions = set()
    for number, weights in enumerate(sent):
        assert weights.keys() == dict(model.named_parameters()).keys()
        model.load_state_dict(weights, strict=False)
        for sample, _ in drawn:
            trained = sample.old_log_probs[sample.completion_mask.astype(bool)].tolist()
            if sample.model_version == sample.metrics["rollout/newest_version"] == number + 1:
                versions.add(number + 1)
                assert logprobs_of(model, sample) == pytest.approx(trained, abs=1e-3)
            elif number + 1 not in (sample.model_version, sample.metrics["rollout/newest_version"]):
                assert logprobs_of(model, sample) != pytest.approx(trained, abs=1e-3)
    assert {1, 2} <= versions

    # Nothing is left open, also of the groups that were begun for later steps.
    assert len(opened) >= len(expected) // 2
    keys = [(one.base_url, {"Authorization": f"Bearer {one.api_key}"}) for one in opened]
    assert {httpx.get(where, headers=key).status_code for where, key in keys} == {401}

    check_sampled_again(url, sent[0], played)


def check_sampled_again(url: str, weights: dict, played: dict) -> None:
    """Has engines sample the first group again, by token ids, under the weights that it was made under."""
    service = HttpWeights(url.replace("://", f"://trainer:{TOKENS['trainer']}@"))
    service.send_weights_blocking(service.next_version_blocking(), weights)
    client = Client(url, TOKENS["evaluator"])
    group, request = played[0]
    named = {"group": "0", "seed": SEED, "step": 0, "sampling": request["sampling"]}
    assert request["seed"] == SEED and len(group.trajectories) == SAMPLES
    for one in group.trajectories:
        again = client.trajectory_blocking(index=one.index, **named)
        turns = sorted(
            ((turn, row) for row in one.rows.rows for turn in row.turns if row.mask[turn.start]),
            key=lambda found: found[0].turn,
        )
        for turn, row in turns:
            tokens = list(row.token_ids[turn.start : turn.end])
            asked = {"prompt": list(row.token_ids[: turn.start]), "max_tokens": len(tokens), "logprobs": 1}
            headers = {"Authorization": f"Bearer {again.api_key}"}
            answer = httpx.post(
                f"{again.base_url}/completions", json=asked | {"return_token_ids": True}, headers=headers, timeout=120
            )
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["token_ids"] == tokens, f"trajectory {one.index}, turn {turn.turn}"
            logprobs = row.logprobs[turn.start : turn.end]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
        again.close_blocking()
    client.close()
