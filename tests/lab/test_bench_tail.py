"""The tail benchmark's arithmetic, its history, and its command's complaints."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import yaml

from tailrace.app.config import DEFAULT_CONFIG, ELASTIC_CONFIG, ServeFile, load_config
from tailrace.app.errors import BadInput
from tailrace.deployments.context.archive import Archive
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.prompt_files import EVERY
from tailrace.deployments.messages.drafts import EVIDENCE
from tailrace.deployments.messages.rollout import PromptGroup
from tailrace.deployments.messages.status import ReplicasChanged
from tailrace.lab.benchmarks.commands.tail import command
from tailrace.lab.benchmarks.live import tail_simulated
from tailrace.lab.benchmarks.live.medians import middle
from tailrace.lab.benchmarks.live.tail import TAILS, Replay, drain_s, drawn, evened, named, occupied_s, ratios, rotated
from tailrace.lab.benchmarks.live.tail_simulated import Rate, simulated
from tailrace.lab.simulator.types import ReplicaModel, StepModel
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.registry import Policies
from tailrace.policies.families.tail import Draft, Hold


def change(at_s: float, replicas: int) -> ReplicasChanged:
    return ReplicasChanged(replicas=replicas, wanted=replicas, reason="", at_s=at_s)


def test_replica_seconds_are_those_in_which_a_replica_was_up():
    heard = [change(3.0, 2), change(14.0, 1), change(18.0, 2)]
    assert occupied_s(heard, 10.0, 20.0) == 2 * 4 + 1 * 4 + 2 * 2
    assert occupied_s(heard, 10.0, 12.0) == 4
    assert occupied_s([change(3.0, 2)], 10.0, 20.0) == 20


def test_a_drain_begins_when_all_that_is_left_has_a_place():
    ends_s = [9.0, 1.0, 4.0, 2.0, 7.0]
    assert drain_s(ends_s, 2) == 9.0 - 4.0, "the third end leaves two"
    assert drain_s(ends_s, 4) == 9.0 - 1.0 and drain_s(ends_s, 5) == drain_s(ends_s, 8) == 9.0


def test_what_a_slow_machine_adds_before_the_tail_is_nobodys():
    """`hold` drains in 5, 7 and 9 s behind 10, 11 and 12; `auto` in 6 behind 20."""
    hold = middle([{"makespan_s": 10 + n + 5 + 2 * n, "tail_s": 1.0, "drain_s": 5.0 + 2 * n} for n in range(3)])
    auto = middle([{"makespan_s": 26.0, "tail_s": 1.0, "drain_s": 6.0}])
    assert evened({"hold": hold, "auto": auto}) == {"hold": 11.5 + 7.0, "auto": 11.5 + 6.0}
    assert evened({}) == {}


def test_runs_differ_from_the_configuration_in_what_freed_replicas_do():
    file = load_config(ELASTIC_CONFIG)
    configured = file.application.policies
    runs = named(file, configured.chunking.chunk_tokens)
    assert named(file, 7)["auto"].chunking.chunk_tokens == 7 and runs["static"].chunking.chunk_tokens is None
    ours = [name for name in TAILS if name != "draft"]
    assert list(runs) == ["static", "routed", "routed_group", "seer", *ours, "lanes"]
    with_lanes = runs["auto"].model_copy(update={"lanes": runs["lanes"].lanes, "lengths": runs["lanes"].lengths})
    assert runs["lanes"] == with_lanes and runs["lanes"].lanes.on and not runs["auto"].lanes.on
    assert runs["routed"].chunking.chunk_tokens is None and runs["routed"].ordering.type == "fcfs"
    grouped = runs["routed_group"].model_copy(update={"drafting": runs["routed"].drafting})
    assert grouped.model_copy(update={"lengths": runs["routed"].lengths}) == runs["routed"]
    assert runs["routed_group"].drafting == configured.drafting and configured.drafting.max_draft_tokens
    for name in ours:
        kept = runs[name].model_copy(update={"tail": configured.tail, "racing": configured.racing})
        assert kept.model_copy(update={"lanes": configured.lanes}) == configured and not kept.lanes.on
    assert all(isinstance(runs[name].tail, Hold) for name in ("static", "routed", "seer", "hold", "race"))
    assert [name for name in ours if runs[name].racing.room] == ["race", "auto"]
    race, auto = (runs[name].racing.method_table.among(tuple(EVIDENCE)) for name in ("race", "auto"))
    assert [rung.method for rung in race.others("group")] == ["history", "ngram"] and not auto.others("group")
    assert {runs[name].drafting.type for name in ("seer", "static", "routed")} == {"off"}


def test_draft_models_have_the_place_of_what_went_where_there_may_be_some():
    data = yaml.safe_load(ELASTIC_CONFIG.read_text())
    application = data["applications"][0]
    application["args"]["drafter"] = {"model": "demo", "replicas": {"min": 0, "max": 1}}
    runs = named(ServeFile.model_validate(data), 7)
    assert list(runs) == ["static", "routed", "routed_group", "seer", *TAILS, "lanes"]
    assert isinstance(runs["draft"].tail, Draft)


def test_orders_draw_alike_within_a_turn_and_anew_in_the_next():
    """So one policy's luck with the longest sample is every policy's."""
    file = load_config(ELASTIC_CONFIG)
    turns = [{name: drawn(policies, turn) for name, policies in named(file, 7).items()} for turn in range(3)]
    assert turns[0] == named(file, 7)
    for one, other in pairwise(turns):
        assert {one[name].ordering.seed + 1 for name in TAILS if name in one} == {other["seer"].ordering.seed}
        assert one["static"] == other["static"]
        assert other["auto"].model_copy(update={"ordering": one["auto"].ordering}) == one["auto"]
    assert drawn(Policies(ordering="fcfs"), 5) == Policies(ordering="fcfs")


def test_each_turn_begins_with_another_run():
    names = ("a", "b", "c", "d")
    assert [rotated(names, turn, 4) for turn in range(4)] == [
        ("a", "b", "c", "d"), ("b", "c", "d", "a"), ("c", "d", "a", "b"), ("d", "a", "b", "c")
    ]  # fmt: skip
    assert rotated(names, 0, 1) == names and rotated(names, 1, 2) == ("c", "d", "a", "b")


class Words:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def test_the_earlier_checkpoint_is_history_and_the_batch_comes_after_it(tmp_path):
    line = {"prompt_id": "p", "prompt": "why", "epochs": [{"policy_step": 7, "samples": [{"text": "because"}]}]}
    replay = Replay((), (), [line], Words())
    assert replay.step == 8
    replay.remember(tmp_path)
    kept = [file.totals() for file in Archive(ContextConfig(history_dir=str(tmp_path)), EVERY).files()]
    assert sum(one.answers for one in kept) == 1 and sum(one.tokens for one in kept) == len("because")
    assert max(one.newest_epoch for one in kept if one.answers) == 7


def test_a_rate_is_the_same_for_all():
    assert Rate(0.7).chance(None, 0, 5, 3, 1) == 0.7


DRAWS = 2

MODEL = ReplicaModel(StepModel(0.06, 0.003, 0.0), 4096, 2, 300.0, 8000.0, 0.001, handover_s=0.01, block_tokens=32)


def prompt_groups(lengths: tuple[tuple[int, ...], ...], words: int) -> list[PromptGroup]:
    """Answers that count up to their length, over and over again in so many words."""
    return [
        PromptGroup(
            prompt_id=f"p{place}", token_ids=(1, 2, 3 + place), samples=len(of_group), max_tokens=400,
            forced_token_ids=tuple(tuple(10 + place + n % words for n in range(length)) for length in of_group),
        )
        for place, of_group in enumerate(lengths)
    ]  # fmt: skip


@pytest.fixture
def few_draws(monkeypatch):
    monkeypatch.setattr(tail_simulated, "DRAWS", DRAWS)


def by_draw() -> dict[str, Callable[[int], Policies]]:
    return {name: partial(drawn, policies) for name, policies in named(load_config(ELASTIC_CONFIG), 64).items()}


@pytest.mark.slow
def test_runs_are_simulated_without_noise_and_with_the_earlier_answers(few_draws):
    """One sample is four times as long as the others, so one of two replicas has nothing to do in the end."""
    groups = prompt_groups(((40, 50), (45, 390), (60, 30)), 90)
    named_of = by_draw()
    said = []
    first, again = (simulated(groups, groups, (MODEL, MODEL), Limits(1, 2), named_of, said.append) for _ in range(2))
    assert first == again, "nothing but decisions tells two runs apart"
    assert set(first) == set(named_of) - {"race"} and len(said) == 2 * len(first)
    assert all(len(run["all_makespan_s"]) == DRAWS for run in first.values())
    assert first["hold"]["returned_replica_s"] == 0 < first["auto"]["returned_replica_s"]
    assert first["hold"]["makespan_s"] < first["seer"]["makespan_s"], "drafts"
    assert first["routed_group"]["makespan_s"] < first["routed"]["makespan_s"], "drafts, without chunks"
    assert all(0 < run["bound_share"] < run["reachable_share"] for run in first.values())
    other = prompt_groups(((40, 50), (45, 60), (60, 30)), 7)
    without = simulated(groups, other, (MODEL, MODEL), Limits(1, 2), {"hold": named_of["hold"]}, said.append)
    assert first["hold"]["makespan_s"] < without["hold"]["makespan_s"], "who has been told the answers drafts better"


@pytest.mark.slow
def test_lanes_by_true_lengths_are_simulated(few_draws):
    """Three long samples and nine short ones: who knows them gives the long ones a replica."""
    groups = prompt_groups(((390, 380), (370, 30), (30, 25), (40, 35), (30, 25), (40, 35)), 90)
    of = {"hold": by_draw()["hold"], "clairvoyant": lambda draw: Policies(lanes="clairvoyant", drafting="off")}
    runs = simulated(groups, groups, (MODEL, MODEL), Limits(2, 2), of, lambda _: None)
    assert runs["clairvoyant"]["makespan_s"] > 0
    assert runs["clairvoyant"]["all_makespan_s"] != runs["hold"]["all_makespan_s"]


def test_who_never_drafts_has_the_steps_of_who_does_not(few_draws):
    groups = prompt_groups(((40, 50), (45, 60)), 90)
    slow = replace(MODEL, step=StepModel(0.6, 0.03, 0.0))
    named_of = by_draw()
    kept = {name: named_of[name] for name in ("seer", "hold")}
    plain, drafting = (
        simulated(groups, groups, models, Limits(1, 2), kept, lambda _: None)
        for models in ((slow, MODEL), (MODEL, slow))
    )
    assert plain["seer"]["makespan_s"] > 5 * drafting["seer"]["makespan_s"]
    assert drafting["hold"]["makespan_s"] > 5 * plain["hold"]["makespan_s"]


def test_a_trace_with_one_checkpoint_is_refused_by_name(tmp_path):
    path = tmp_path / "trace.jsonl"
    told = [{"policy_step": 5, "samples": [{"text": "b"}]}]
    path.write_text(json.dumps({"prompt_id": "p9", "prompt": "a", "epochs": told}))
    with pytest.raises(BadInput, match="'p9' has one checkpoint"):
        command.main(["--trace", str(path)], standalone_mode=False)


@pytest.mark.parametrize(
    ("name", "said"), [("haul", "known: static, routed, routed_group, seer"), ("draft", "no drafter with two")]
)
def test_a_run_that_cannot_be_is_refused_by_name(tmp_path, name, said):
    path = tmp_path / "trace.jsonl"
    told = [{"policy_step": step, "samples": [{"text": "b"}]} for step in (4, 5)]
    path.write_text(json.dumps({"prompt_id": "p9", "prompt": "a", "epochs": told}))
    with pytest.raises(BadInput, match=f"--runs {name}: .*{said}"):
        command.main(["--trace", str(path), "--runs", "hold", "--runs", name], standalone_mode=False)


def test_there_are_ratios_to_baselines_that_ran():
    runs = {"static": {"makespan_s": 3.0}, "hold": {"makespan_s": 2.0}}
    assert ratios(runs, "static") == {"static": 1.0, "hold": 1.5} and ratios(runs, "static_suffix") == {}


def test_replicas_that_stay_are_refused():
    with pytest.raises(BadInput, match="neither come nor go"):
        command.main(["--trace", "x", "--config", str(DEFAULT_CONFIG)], standalone_mode=False)


def test_the_middle_of_repeats_and_what_no_run_has():
    found = middle([{"makespan_s": s, "tail_s": s / 2, "accepted_share": None} for s in (3.0, 1.0, 2.0)])
    medians = {"makespan_s": 2.0, "tail_s": 1.0, "accepted_share": None}
    assert found == medians | {"all_makespan_s": [3.0, 1.0, 2.0], "all_tail_s": [1.5, 0.5, 1.0]}
