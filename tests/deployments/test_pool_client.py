"""An engine's client of the pool over a scripted connector: results wait for saves, and say where KV came from."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from stand_ins import loaded_with
from test_line_frames import CHUNK, RESULT

import tailrace.deployments.engine
import tailrace.kvpool.counts
import tailrace.policies.models.performance_estimator  # noqa: F401 - before the client's own import, which is undone
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, KvPlan
from tailrace.deployments.messages.sampling import SamplingParams

STAND_INS = {
    "tailrace.kvpool.connector": {"PoolConnector": object},
    "tailrace.kvpool.worker": {name: name for name in ("begin_again", "layout", "probe", "rejoin")},
}
pool_client = loaded_with("tailrace.deployments.engine.pool_client", STAND_INS)


class Connector:
    """`settled_ids`: requests whose saves have ended. `traffic`: of each request, once."""

    def __init__(self):
        self.settled_ids, self.traffic, self.taken, self.forgone = set(), {}, [], []
        self.scheduled, self.pulls, self.heard = (0, 0), [], 5
        self.counts = Counter({"hit.local": 3})

    def settled(self, request_id: str) -> bool:
        return request_id in self.settled_ids

    def take(self, request_id: str):
        self.taken.append(request_id)
        return self.traffic.pop(request_id)

    def forgo(self, request_id: str) -> None:
        self.forgone.append(request_id)

    def take_pulls(self) -> list[tuple[int, float]]:
        pulls, self.pulls = self.pulls, []
        return pulls

    def begin_again(self, begun: int) -> set[str]:
        return {f"begun {begun}"}


class Performance:
    def __init__(self):
        self.pulled, self.prompts = [], []

    def pull(self, tokens: int, took_s: float, now_s: float) -> None:
        self.pulled.append((tokens, took_s))

    def prompt(self, chunks: int, tokens: int, took_s: float, now_s: float) -> None:
        self.prompts.append((chunks, tokens, took_s, now_s))


class Setting:
    """A client with a save deadline of a second, and a clock by hand."""

    def __init__(self, monkeypatch):
        self.connector, self.performance, self.now_s, self.calls = Connector(), Performance(), 10.0, []
        self.rejoined = [None, None]
        monkeypatch.setattr(pool_client, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        core = SimpleNamespace(scheduler=SimpleNamespace(connector=self.connector))
        self.engine = SimpleNamespace(
            engine_core=SimpleNamespace(engine_core=core), collective_rpc=self._collective_rpc
        )
        self.client = pool_client.PoolClient(self.engine, 1.0, self.performance)

    def _collective_rpc(self, method: str, args: tuple = ()):
        self.calls.append((method, *args))
        return {
            "layout": [("prefixes", 100), ("others", 50)],
            "probe": [[(64, 0.25)], [(1, 1.0)]],
            "begin_again": [7, 6],
            "rejoin": self.rejoined,
        }[method]


@pytest.fixture
def setting(monkeypatch) -> Setting:
    return Setting(monkeypatch)


def traffic(cause: str = "miss", pulled: int = 0, saved: int = 0, names=(b"ab", b"cd")):
    return SimpleNamespace(cause=cause, pulled_tokens=pulled, saved_tokens=saved, names=list(names))


def chunk_of(context: int = 12, **fields) -> ChunkRequest:
    return replace(CHUNK, token_ids=np.zeros(context, np.int32), prompt_tokens=8, turn_start=0, **fields)


def result_of(**fields) -> ChunkResult:
    return replace(RESULT, **{"cached_tokens": 7, "computed_tokens": 5, "token_ids": np.zeros(5, np.int32)} | fields)


def test_a_client_knows_the_layout_of_all_ranks_and_the_speed_of_one(setting):
    assert setting.client.key_prefixes == "prefixes" and setting.client.token_bytes == 150
    assert setting.performance.pulled == [(64, 0.25)] and setting.calls == [("layout",), ("probe",)]
    setting.client.rejoin("10.0.0.3:1")
    assert setting.calls[-1] == ("rejoin", "10.0.0.3:1")
    setting.rejoined = [None, "no master"]
    with pytest.raises(RuntimeError, match="no master"):
        setting.client.rejoin("10.0.0.4:1")
    assert setting.client.begin_again() == {"begun 6"} and setting.calls[-1] == ("begin_again", 5)
    setting.client.forgo("r")
    assert setting.connector.forgone == ["r"]


@pytest.mark.parametrize(
    ("fields", "wish"),
    [
        (
            {"kv": KvPlan(4, 16, False, "ab", True)},
            {"version": 4, "min_pull_tokens": 16, "save": False, "save_stopped": True, "save_prompt": False},
        ),
        (
            {"kv": KvPlan(4), "context": 8},
            {"version": 4, "min_pull_tokens": 1, "save": True, "save_stopped": False, "save_prompt": True},
        ),
        (
            {"kv": None, "context": 8, "weights_version": 9},
            {"version": 9, "min_pull_tokens": None, "save": False, "save_stopped": False, "save_prompt": False},
        ),
        (
            {"kv": KvPlan(4), "context": 8, "sampling": SamplingParams(prompt_logprobs=0)},
            {"version": 4, "min_pull_tokens": None, "save": True, "save_stopped": False, "save_prompt": True},
        ),
    ],
)
def test_a_chunk_s_plan_is_what_vllm_is_asked_for(setting, fields, wish):
    assert setting.client.wish(chunk_of(**fields)) == wish


def test_a_chunk_is_named_once_when_its_saves_have_ended_or_are_late_and_not_before(setting):
    client = setting.client
    assert client.saved() == []
    for name in ("a", "b", "c"):
        setting.connector.traffic[name] = traffic()
        client.save(f"chunk {name}", name)
    setting.now_s += 0.5
    setting.connector.traffic["d"] = traffic()
    client.save("chunk d", "d")
    assert client.saved() == []
    setting.connector.settled_ids = {"b"}
    assert client.saved() == ["chunk b"] and client.saved() == []
    client.fields("b", chunk_of(), result_of())
    setting.now_s += 0.5
    assert client.saved() == [], "a second is not over"
    setting.now_s += 0.25
    assert client.saved() == ["chunk a", "chunk c"]
    for name in ("a", "c"):
        client.fields(name, chunk_of(), result_of())
    assert setting.connector.taken == ["b", "a", "c"]
    counts = client.counts()
    assert counts["save_late"] == 2 and counts["hold_ms.512"] == 1 and counts["hold_ms.2048"] == 2
    setting.connector.traffic["e"] = traffic()
    client.forget("e")
    assert setting.connector.taken[-1] == "e"


def test_a_step_that_raises_does_not_drop_the_record_of_an_ended_chunk_that_is_not_answered_yet(setting):
    """Aborted during its pull, it has a request in vLLM until the load returns, which `Recovery` forgets."""
    setting.connector.traffic["r"] = traffic("tail", pulled=4)
    setting.client.save("chunk", "r")
    setting.client.forget("r")
    setting.connector.settled_ids = {"r"}
    assert setting.client.saved() == ["chunk"]
    assert setting.client.fields("r", chunk_of(), result_of())["pulled_tokens"] == 4
    assert setting.connector.taken == ["r"]


@pytest.mark.parametrize(
    ("context", "computed", "found", "cause", "pulled"),
    [
        (12, 5, traffic("miss"), "miss", 0),
        (8, 5, traffic("miss"), "new", 0),
        (8, 5, traffic("not_pulled"), "new", 0),
        (8, 5, traffic("below_min"), "new", 0),
        (8, 5, traffic("pull_late", pulled=4), "pull_late", 0),
        (12, 5, traffic("", pulled=4), "", 4),
        (12, 0, traffic("miss", pulled=4), "", 4),
    ],
)
def test_tokens_are_counted_by_where_their_kv_came_from(setting, context, computed, found, cause, pulled):
    setting.connector.traffic["r"], setting.connector.settled_ids = found, {"r"}
    fields = setting.client.fields("r", chunk_of(context), result_of(computed_tokens=computed))
    assert fields == {
        "pulled_tokens": pulled, "stored_tokens": 0, "kv_names": b"abcd", "recompute_cause": cause
    }  # fmt: skip
    counts = setting.client.counts()
    assert counts.get("local_tokens", 0) == 7 - pulled and counts.get("pool_tokens", 0) == pulled
    assert counts["hit.local"] == 3 and not counts.get("save_late")
    by_cause = {name: count for name, count in counts.items() if name.startswith("recomputed_tokens") and count}
    named = "new" if context == 8 and found.cause in ("miss", "not_pulled", "below_min") else found.cause
    assert by_cause == ({f"recomputed_tokens.{named}": computed} if computed else {})


def test_a_chunk_that_is_aborted_during_its_pull_lowers_no_count(setting):
    """Counters of Prometheus went down by the tokens of each such pull."""
    setting.connector.settled_ids = {"r", "s"}
    for name in ("r", "s"):
        setting.connector.traffic[name] = traffic("tail", pulled=4)
    setting.client.fields("r", chunk_of(), result_of(computed_tokens=5))
    before = setting.client.counts()
    fields = setting.client.fields("s", chunk_of(), result_of(cached_tokens=0, computed_tokens=0))
    assert fields["pulled_tokens"] == 0 and setting.client.counts() == before
    assert before["local_tokens"] == 3 and before["pool_tokens"] == 4


@pytest.mark.parametrize(("saved", "stored"), [(0, 0), (16, 16), (17, 17), (40, 17)])
def test_no_more_tokens_are_stored_than_the_chunk_has(setting, saved, stored):
    setting.connector.traffic["r"], setting.connector.settled_ids = traffic(saved=saved), {"r"}
    assert setting.client.fields("r", chunk_of(12), result_of())["stored_tokens"] == stored


def test_prompts_and_pulls_are_measured_where_they_were(setting):
    client = setting.client
    setting.performance.pulled.clear()
    client.after_step(0.5, client.scheduled, False, 11.0)
    setting.connector.scheduled = (64, 2)
    client.after_step(0.5, client.scheduled, True, 12.0)
    assert setting.performance.prompts == [] and setting.performance.pulled == []
    setting.connector.pulls = [(32, 0.125)]
    client.after_step(0.5, client.scheduled, False, 13.0)
    client.after_step(0.25, client.scheduled, True, 14.0)
    assert setting.performance.prompts == [(2, 64, 0.5, 13.0)] and setting.performance.pulled == [(32, 0.125)]
    counts = client.counts()
    assert counts["step_ms.512"] == 3 and counts["step_ms.256"] == 1 and client.counts() == counts
