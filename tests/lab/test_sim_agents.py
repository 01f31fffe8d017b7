"""Sessions of agents in the simulator: the trace, caches, one engine's time, and the routers on a small trace."""

import gzip
import json

import pytest

from tailrace.app.cli import run
from tailrace.lab.simulator.agents.caches import ContextCache, Tiers
from tailrace.lab.simulator.agents.figures import agent_replica
from tailrace.lab.simulator.agents.host import AgentHost, SessionRun
from tailrace.lab.simulator.agents.request import AgentCounts, AgentRequest
from tailrace.lab.simulator.agents.routers import LongestPrefix, RoundRobinPool, Sticky
from tailrace.lab.simulator.agents.scheduled import Scheduled
from tailrace.lab.simulator.agents.trace import AgentSession, AgentTurn, read_sessions

MODEL = agent_replica("H100", "Qwen2.5-7B-Instruct-1M", 1, 80e9, 0.0)


def request(tokens: int, out: int, parent: int | None, shared: int, **more) -> dict:
    return {"t": 0.0, "in": tokens, "out": out, "parent": parent, "shared": shared, "think_s": 5.0} | more


def written(tmp_path, *requests: dict, name: str = "trace.jsonl"):
    path = tmp_path / name
    text = json.dumps({"id": "s", "requests": requests}) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def sessions(count: int = 60, turns: int = 12, context: int = 60_000) -> list[AgentSession]:
    """Sessions that grow by 1,000 tokens a turn."""
    steps = [
        AgentTurn(
            after=i - 1 if i else None,
            gap_s=8.0,
            line=0,
            source=0 if i else None,
            context=context + 1_000 * i,
            known=context + 1_000 * (i - 1) + 300 if i else 0,
            out=300,
            ends_line=i == turns - 1,
        )
        for i in range(turns)
    ]
    return [AgentSession(f"s{n}", tuple(steps)) for n in range(count)]


# ---- the trace -----------------------------------------------------------------------------------------


def test_a_request_extends_its_line_or_begins_a_branch(tmp_path):
    path = written(
        tmp_path,
        request(1_000, 100, None, 0),
        request(1_500, 50, 0, 960, think_s=900.0),  # extends: all but a block of the prompt before is shared
        request(1_100, 50, 1, 512),  # compaction
        request(600, 10, 2, 512, agent=7),  # a sub-agent, while the line before goes on
        request(1_400, 10, 2, 1_088),
        name="trace.jsonl.gz",
    )
    (session,) = read_sessions(path, gap_cap_s=60.0, max_context=10_000)
    lines = [(turn.line, turn.source, turn.known, turn.forks, turn.ends_line) for turn in session.turns]
    assert lines == [
        (0, None, 0, False, False),
        (0, 0, 1_100, False, False),
        (2, 0, 512, False, False),
        (3, 2, 512, True, True),
        (2, 2, 1_150, False, True),
    ]
    assert [turn.after for turn in session.turns] == [None, 0, 1, 2, 2]
    assert session.turns[1].gap_s == 60.0 and session.turns[2].gap_s == 5.0
    (cut,) = read_sessions(path, gap_cap_s=60.0, max_context=1_540)
    assert len(cut.turns) == 1


def test_a_sub_agent_that_begins_with_its_parent_s_whole_context_is_a_branch(tmp_path):
    """The main agent extends the same context at the same time: one line cannot be both."""
    first, extended = request(1_000, 100, None, 0), request(1_200, 50, 0, 960)
    path = written(tmp_path, first, extended, extended | {"agent": "sub"})
    (session,) = read_sessions(path, gap_cap_s=60.0, max_context=10_000)
    assert [(turn.line, turn.source, turn.after, turn.known) for turn in session.turns] == [
        (0, None, None, 0), (0, 0, 0, 1_100), (2, 0, 0, 960),
    ]  # fmt: skip
    AgentHost([session], MODEL, 1, Scheduled(), 1).run(0, 3)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"in": 0}, "line 1, requests.1.in: 0"),
        ({"out": "5"}, "line 1, requests.1.out: '5'"),
        ({"shared": 9_999}, "line 1, requests.1.shared: 9999 of 700"),
        ({"parent": 1}, "line 1, requests.1.parent: 1"),
        ({"think_s": -1}, "line 1, requests.1.think_s: -1"),
    ],
)
def test_errors_of_a_trace_name_file_line_and_key(tmp_path, broken, named):
    path = written(tmp_path, request(500, 5, None, 0), request(700, 5, 0, 448) | broken)
    with pytest.raises(ValueError, match=named) as caught:
        read_sessions(path, 60.0, 10_000)
    assert str(path) in str(caught.value)


def test_a_gzip_file_that_is_broken_inside_is_one_line(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    data = bytearray(gzip.compress(b"{}" * 100))
    data[10] |= 6  # a kind of block that there is not
    path.write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read") as caught:
        read_sessions(path, 60.0, 10_000)
    assert str(path) in str(caught.value)


# ---- caches ----------------------------------------------------------------------------------------------


def test_a_cache_drops_the_ends_of_what_was_used_least_recently():
    cache = ContextCache(100)
    cache.put("a", 60)
    cache.put("b", 40)
    cache.use("a")
    cache.put("c", 30)
    assert (cache.of("a"), cache.of("b"), cache.of("c"), cache.tokens) == (60, 10, 30, 100)
    assert cache.take("a", but=20) == 40 and cache.of("a") == 20


def test_what_dram_puts_out_lies_on_ssd():
    tiers = Tiers(100, 200)
    tiers.put("a", 80)
    tiers.put("b", 80)
    assert tiers.find("a") == (80, True) and tiers.find("b") == (80, False) and tiers.capacity == 300
    tiers.drop("a")
    assert tiers.find("a")[0] == 0


# ---- time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("router", [Sticky, RoundRobinPool, Scheduled, lambda: LongestPrefix(4)])
def test_one_session_alone_takes_the_time_of_its_own_steps(router):
    (session,) = sessions(1, turns=3)
    _, took_s = AgentHost([session], MODEL, 1, router(), 1).run(0, 3)
    step, expected_s = MODEL.step, 2 * 8.0
    for turn in session.turns:
        new = turn.context - turn.known // 16 * 16
        prefill_s = new * (step.token_s + MODEL.attention_s * (turn.context - new / 2))
        prefill_s += new / MODEL.step_tokens * step.base_s
        expected_s += prefill_s + 299 * (step.base_s + step.token_s + step.context_s * (turn.context + 150))
    assert took_s == pytest.approx(expected_s, rel=1e-3)


def test_seconds_in_which_kv_comes_are_counted_apart_and_go_with_the_network():
    (session,), found = sessions(1, turns=3), []
    for pool_bytes_s in (50e9, 25e9):
        model = agent_replica("H100", "Qwen2.5-7B-Instruct-1M", 1, 80e9, 0.0, pool_bytes_s)
        host = AgentHost([session], model, 1, RoundRobinPool(), 1)
        host.engines[0].cache.capacity = 0  # nothing is found in HBM
        counts, _ = host.run(0, 3)  # of the second and the third turn: the first came before
        known = [turn.known // 16 * 16 for turn in session.turns[1:]]
        assert counts.dram == sum(known) and counts.hbm == 0
        assert counts.fetches == pytest.approx([0.02 + tokens * 57_344 / (0.8 * pool_bytes_s) for tokens in known])
        found.append([whole - fetch for whole, fetch in zip(counts.at_replica, counts.fetches, strict=True)])
        assert counts.at_replica == pytest.approx(counts.waits), "nothing waits to begin"
    assert found[0] == pytest.approx(found[1]), "the rest is computing"


def test_a_preempted_request_counts_what_was_computed_and_its_first_token_once():
    """A branch of 1,000 tokens, 300 of its source's: preempted as 100 more were computed, and at its first token."""
    turn = AgentTurn(after=None, gap_s=0.0, line=1, source=0, context=1_000, known=300, out=10)
    counts = AgentCounts()
    request = AgentRequest(SessionRun(0, AgentSession("s", (turn,))), 0, counts, 0.0)
    request.found(0, 300, False, 700)
    request.left = 600.0
    request.preempted(0)
    assert request.source == (request.run, 0), "it may find the source's KV again"
    request.found(0, 300, False, 700)
    assert (counts.recomputed, counts.known) == (100, 300)
    request.number = 1
    request.begins(5.0)
    request.preempted(0)
    assert (request.made, request.tokens, request.context) == (1, 9, 1_001)
    request.begins(9.0)
    assert counts.waits == [5.0] and counts.preemptions == 2


def test_waiting_to_begin_is_no_time_at_a_replica():
    counts, _ = AgentHost(sessions(), MODEL, 1, Scheduled(), 2 * MODEL.dram_tokens // 66_000).run(0, 200)
    waited_s = [whole - here for whole, here in zip(counts.waits, counts.at_replica, strict=True)]
    assert min(waited_s) == 0 and max(waited_s) > 1
    assert all(fetch <= here for fetch, here in zip(counts.fetches, counts.at_replica, strict=True))


def test_the_same_run_gives_the_same_counts_and_its_tokens_are_all_there():
    runs = [AgentHost(sessions(), MODEL, 2, Scheduled(), 12).run(40, 100) for _ in range(2)]
    assert runs[0] == runs[1]
    counts, _ = runs[0]
    assert counts.hbm + counts.dram + counts.recomputed == pytest.approx(counts.known, rel=0.01)


def test_trajectories_that_fit_compute_next_to_nothing_again_where_others_thrash():
    load = 2 * 2 * MODEL.dram_tokens // 66_000  # twice what the pool holds
    ours, ours_s = AgentHost(sessions(), MODEL, 2, Scheduled(), load).run(150, 300)
    theirs, theirs_s = AgentHost(sessions(), MODEL, 2, Sticky(), load).run(150, 300)
    assert ours.recomputed < 0.03 * ours.known and theirs.recomputed > 0.5 * theirs.known
    assert theirs_s > 1.5 * ours_s


# ---- the command -----------------------------------------------------------------------------------------


def many(tmp_path):
    """Returns the file of 40 sessions of 8 turns, with a context of 47,000 tokens on average."""
    grown = [request(40_000 + 2_000 * i, 200, i - 1 if i else None, 40_000 + 2_000 * i - 2_064 if i else 0)
             for i in range(8)]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"id": n, "requests": grown}) + "\n" for n in range(40)))
    return path


def test_bench_agents_has_the_share_of_first_tokens_that_waits_for_kv(tmp_path, capsys):
    found = []
    for gbit in ("400", "100"):
        given = ["--trace", str(many(tmp_path)), "--sizes", "all", "--replicas", "1", "--pool-gbit", gbit, "--json"]
        assert run(["bench", "agents", *given]) == 0
        result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["sizes"]["all"]
        assert 0 < result["fetch_p50_s"] <= result["ttft_p50_s"] + 0.005 and 0 < result["fetch_share"] < 1
        found.append(result["fetch_p50_s"])
    assert found[1] > 2 * found[0]


def test_bench_agents_compares_tailrace_with_the_best_rival(tmp_path, capsys):
    path = many(tmp_path)
    given = ["--trace", str(path), "--sizes", "half", "--replicas", "1", "--dram-gb", "10", "--json"]
    assert run(["bench", "agents", *given]) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    half = result["sizes"]["half"]
    best = max(rival["trajectories_per_h"] for rival in half["rivals"].values())
    assert half["ratio_to_best"] == pytest.approx(half["trajectories_per_h"] / best, abs=1e-3)
    assert set(half["rivals"]) == {"sticky", "prefix", "round_robin_pool"} and result["assumptions"]["pool"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--sizes", "third"], "--sizes third"),
        (["--model", "Qwen"], "--model"),
        (["--model", "Kimi-K2", "--gpus-per-replica", "32"], "has experts"),
        (["--max-context", "900000"], "--max-context 900000"),
        ([], "no.jsonl: cannot be read"),
    ],
)
def test_bad_input_is_one_line_that_names_it(capsys, given, named):
    assert run(["bench", "agents", "--trace", "no.jsonl", *given]) == 2
    assert named in capsys.readouterr().err.strip().splitlines()[-1]
