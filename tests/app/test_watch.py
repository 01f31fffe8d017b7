"""The content of `tailrace status` and `top`: rates between looks, the longest samples, troubles."""

import json
import pickle
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
from performances import performance
from rich.console import Console
from test_rollout_cases import core_of, finish, submit, tick

from tailrace.app.cli import run
from tailrace.app.watch.rates import WINDOW_S, Rates, ReplicaRates
from tailrace.app.watch.tables import pool_line, troubles, view
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.coordinator.snapshot import replica_statuses, sample_statuses
from tailrace.deployments.feed.survey import Survey
from tailrace.deployments.feed.trails import Trails
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.status import BatchStatus, PoolView, ReplicaStatus, SampleStatus, ServiceSnapshot
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.performance import Performance

REPORTED = (
    "preemptions", "work", "performance", "cores", "dtype", "ranks", "weight_transfer", "max_loras", "step_counts",
    "weights_pause_s", "keeps_routes",
)  # fmt: skip


def replica(name: str = "r1", **said) -> ReplicaStatus:
    usual = {"ready": True, "running": 2, "max_running": 8, "kv_used_share": 0.25, "weights_version": 3}
    return ReplicaStatus(replica_id=name, preemptions=0, **(usual | said))


def batch(tokens: int, **said) -> BatchStatus:
    usual = {"samples": 8, "ended": 6, "groups": 2, "emitted": 1, "tail": False, "seconds": 4.0}
    return BatchStatus(tokens=tokens, **({"batch_id": "step-7"} | usual | said))


def service(replicas=(), batches=(), **said) -> ServiceSnapshot:
    usual = {"waiting": 1, "running": 2, "observed_s": 0.1, "waits_for": None, "policies": {}, "model": "/models/m"}
    return ServiceSnapshot(replicas=tuple(replicas), batches=tuple(batches), **(usual | said))


def work(tokens: int, verifications: int, **more) -> dict[str, int]:
    return {"tokens": tokens, "verifications": verifications} | more


SAMPLE = SampleStatus(sample_id="step-7/sky#3", state="running", replica_id="r1", tokens=1_234, expected_tokens=2_000,
                      max_tokens=4_096, chunks=3, copies=1)  # fmt: skip


def shown(drawn) -> str:
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115 - rich closes nothing
    console.print(drawn)
    return console.export_text()


def test_rates_are_between_the_first_and_the_last_look_of_the_window():
    rates = Rates()
    first = work(1_000, 500, **{"drafted.group": 100, "accepted.group": 40, "drafted.ngram": 7})
    rates.add(10.0, service([replica(work=first)], [batch(100)]))
    assert rates.replica("r1") == ReplicaRates() and rates.batch("step-7") is rates.service() is None
    last = work(1_300, 600, **{"drafted.group": 150, "accepted.group": 80, "drafted.ngram": 7, "accepted.ngram": 0})
    rates.add(12.0, service([replica(work=last)], [batch(160)]))
    assert rates.replica("r1") == ReplicaRates(150.0, 3.0, {"group": 0.8})
    assert (rates.batch("step-7"), rates.service()) == (30.0, 150.0)


def test_looks_before_the_window_are_forgotten():
    rates = Rates()
    for at_s in range(20):
        rates.add(float(at_s), service([replica(work=work(at_s**2, at_s))]))
    begin_s = 19 - WINDOW_S
    assert rates.replica("r1").tokens_per_s == (19**2 - begin_s**2) / WINDOW_S


def test_a_replica_that_came_or_began_anew_has_no_rate():
    rates = Rates()
    rates.add(0.0, service([replica("old", work=work(900, 900))]))
    rates.add(1.0, service([replica("old", work=work(10, 10)), replica("new", work=work(50, 50))]))
    assert rates.replica("old") == rates.replica("new") == ReplicaRates() and rates.service() is None


def test_the_longest_unended_samples_come_first_with_state_and_place():
    core, trails = core_of(chunk_tokens=16, a=8), Trails(lambda: 0.0)

    def longest(count):
        survey = Survey(count, part=None)
        survey.look(core)
        return sample_statuses(core, survey.longest(), trails)

    submit(core, ev.GroupSpec("g", 16, 3, 64))
    starts = [action for action in tick(core) if hasattr(action, "max_tokens")]
    core.observe(ev.TokensStreamed(0.5, {starts[1].chunk_id: 9}, 0.5))
    for action in starts:
        trails.act(action)
    finish(core, starts[2])
    found = longest(2)
    assert [one.why for one in found] == ["waits for room on any replica", starts[1].reason]
    assert [(one.sample_id, one.state, one.tokens) for one in found] == [
        (starts[2].sample_id, "waiting", 16), (starts[1].sample_id, "running", 9)
    ]  # fmt: skip
    assert found[1].replica_id == "a" and found[1].max_tokens == 64 and (found[1].chunks, found[1].copies) == (1, 0)
    assert len(longest(100)) == 3 and longest(0) == ()


def test_a_view_names_everything_that_runs():
    rates, at_work = Rates(), work(10, 5, **{"drafted.group": 4, "accepted.group": 3})
    for at_s, counts in ((0.0, work(0, 0)), (1.0, at_work)):
        rates.add(
            at_s, service([replica(work=counts)], [batch(at_s * 10, tail=True)], weights_digest="0123456789abcdef")
        )
    said = {"weights_digest": "0123456789abcdef", "paused": True, "longest": (SAMPLE,)}
    status = service([replica(work=at_work)], [batch(10, tail=True)], **said)
    text = shown(view(status, rates, max_replicas=5))
    for word in ("m, weights 0", "0123456789ab", "PAUSED", "step-7", "75%", "6/8", "tail", "r1", "2/8", "25%",
                 "group 75%", "2.00", "step-7/sky#3", "1,234", "2,000"):  # fmt: skip
        assert word in text, word
    assert "!" not in text


def test_names_with_brackets_are_shown_as_they_are():
    sample = SAMPLE.model_copy(update={"sample_id": "b[bold]/q[/INST]#1"})
    status = service([replica("r[1]")], [batch(10, batch_id="b[bold]")], longest=(sample,))
    rates = Rates()
    rates.add(0.0, status)
    text = shown(view(status, rates, max_replicas=5))
    for name in ("b[bold]/q[/INST]#1", "b[bold] ", "r[1] "):
        assert name in text, text


@pytest.mark.parametrize("level", ["bits", "law"])
def test_the_headline_names_a_level_at_which_runs_may_part(level):
    rates, status = Rates(), service([], exactness=level)
    rates.add(0.0, status)
    text = shown(view(status, rates, max_replicas=5))
    assert ("exactness law" in text) == (level == "law")


def test_rows_of_replicas_are_those_to_look_at_then_the_fullest():
    replicas = [replica(f"r{n}", running=n) for n in range(1, 8)] + [
        replica("bad", aside="3 samples failed", running=0)
    ]
    rates = Rates()
    rates.add(0.0, service(replicas))
    text = shown(view(service(replicas), rates, max_replicas=3))
    assert all(f"{name} " in text for name in ("bad", "r7", "r6")) and "r5" not in text and "5 more replicas" in text


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({"waits_for": "an engine replica"}, "nothing can run: waits for an engine replica"),
        ({"replicas": [replica(aside="2 samples failed")]}, "r1 is set aside: 2 samples failed"),
        ({"pool": PoolView(status=None, token_bytes=1, counts={}, problem="lost")}, "the KV pool is down: lost"),
        ({"contained": {"turn.ValueError": 2}}, "errors contained so far: turn.ValueError 2"),
        ({"at_admission": ("b9",)}, "batch b9 waits for a change of policies, limits or journal"),
    ],
)  # fmt: skip
def test_troubles_are_a_line_each(said, line):
    assert troubles(service(**said)) == [line] and troubles(service([replica()])) == []


def test_the_pool_line_says_where_kv_came_from():
    counts = {"local_tokens": 60, "pool_tokens": 30, "recomputed_tokens.update": 4, "recomputed_tokens.first": 6}
    told = {"dram_bytes": 1 << 30, "dram_capacity_bytes": 4 << 30, "keys": 1_500}
    line = pool_line(PoolView(status=told, token_bytes=1, counts=counts))
    assert line == "KV pool: 1.00 of 4.00 GiB, 1,500 keys; context tokens here 60%, pool 30%, recomputed 10%"
    assert pool_line(PoolView(status=None, token_bytes=1, counts={})).endswith("here -, pool -, recomputed -")


def test_a_replica_s_status_joins_the_core_s_books_and_its_report():
    report = EngineStats(
        replica_id="a", weights_version=0, block_tokens=16, kv_capacity_blocks=8, max_running=4, max_model_len=512,
        draft_tokens=0, observed_at=0.0, preemptions=3, work={"tokens": 5}, performance=performance(), node_id="n",
        cores=(1, 2), dtype="bfloat16", ranks=2, weight_transfer="nccl", max_loras=6, step_counts=(7,),
        weights_pause_s=8.5, keeps_routes=True,
    )  # fmt: skip
    core, registry = core_of(chunk_tokens=16, a=8, b=8), ReplicaRegistry()
    registry.reports["a"], registry.observed_at["a"] = report, 10.0
    found, silent = replica_statuses(core, registry, 12.5)
    for name in REPORTED:
        assert getattr(found, name) == getattr(report, name), name
    assert (found.replica_id, found.ready, found.running, found.closing, found.aside) == ("a", True, 0, False, "")
    assert (found.copies, found.observed_s, found.state, found.kv_used_share) == (0, 2.5, "ready", 0.0)
    assert silent.observed_s is None and silent.work == {} and silent.step_counts == ()
    snapshot = service([found])
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    (said,) = json.loads(snapshot.model_dump_json())["replicas"]
    assert (said["cores"], said["work"]) == ([1, 2], {"tokens": 5})
    assert said["performance"].keys() == {one.name for one in fields(Performance)}


class Served:
    """A client of a service with one replica and one sample; Ctrl-C comes at the third snapshot."""

    def __init__(self):
        self.wanted: list[int] = []

    async def status(self, longest: int = 0) -> ServiceSnapshot:
        return self.status_blocking(longest)

    def status_blocking(self, longest: int = 0) -> ServiceSnapshot:
        self.wanted.append(longest)
        if len(self.wanted) > 2:
            raise KeyboardInterrupt
        return service([replica(work=work(10 * len(self.wanted), 5))], [batch(10)], longest=(SAMPLE,)[:longest])


@pytest.fixture
def served(monkeypatch):
    client = Served()
    cluster = SimpleNamespace(connect=lambda address, role: client)
    monkeypatch.setitem(sys.modules, "tailrace.app.cluster", cluster)
    return client


def test_status_as_json_has_the_snapshot_and_its_longest_samples_apart(served, capsys):
    assert run(["status", "--json", "--longest", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"status", "longest"} and served.wanted == [4] and "longest" not in found["status"]
    assert found["longest"] == [SAMPLE.model_dump(mode="json")]
    assert found["status"]["replicas"][0]["work"] == {"tokens": 10, "verifications": 5}


@pytest.mark.parametrize("words", [["status"], ["top", "--every-s", "0.2"]])
def test_status_and_top_show_the_same_snapshot(words, served, capsys):
    assert run(words) == 0
    assert served.wanted[:2] == [10, 10]
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("step-7/sky#3", "1,234", "r1", "2/8", "75%"))
