"""The simulated shell: conservation, determinism, no preemption, and what list scheduling says must come out."""

import heapq
import subprocess
import sys
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest

from tailrace.lab.simulator.bounds import bounds
from tailrace.lab.simulator.checks import Checks, LawBroken
from tailrace.lab.simulator.chunks import GroupProgress, SimulatedChunk, SimulatedSample
from tailrace.lab.simulator.host import simulate
from tailrace.lab.simulator.occupancy_series import MOST, OccupancySeries
from tailrace.lab.simulator.speculation import Policied
from tailrace.lab.simulator.types import Cluster, Moment, ReplicaModel, SimulatedRun, StepModel, Workload, WorkloadGroup
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import EndSample, SampleEnd, StartChunk
from tailrace.policies.protocol.events import IllegalEvent

MAX_TOKENS = 600
ORDERINGS = ("fcfs", "group_static", "seer", "remaining_first", "oracle_longest_first")
GPU = StepModel(0.01, 5e-5, 1e-8)


class Even:
    """Every draft token is right with one chance."""

    def __init__(self, chance: float):
        self._chance = chance

    def chance(self, group, index, generated, mates, epochs):
        return self._chance


def workload(seed: int = 0, groups: int = 8, samples: int = 4, steps: int = 1) -> Workload:
    random = np.random.default_rng(seed)
    lengths = np.minimum(random.lognormal(5, 1, (steps, groups, samples)).astype(int) + 1, MAX_TOKENS)
    return Workload("small", MAX_TOKENS, tuple(tuple(map(group_of, range(groups), step)) for step in lengths))


def group_of(number: int, lengths: np.ndarray) -> WorkloadGroup:
    return WorkloadGroup(f"g{number}", 30, tuple(map(int, lengths)), ((50, 90),))


def cluster(replicas: int = 3, kv_tokens: int = 2_000, fetch_tokens_s: float = 1e5, running: int = 8) -> Cluster:
    return Cluster(ReplicaModel(GPU, kv_tokens, running, 2e4, fetch_tokens_s, 0.01), replicas, per_node=2)


def policies(ordering: str = "seer", placement: str = "least_kv", chunk: int | None = 100, **more) -> Policies:
    chunking = {"type": "fixed", "chunk_tokens": chunk}
    return Policies(ordering=ordering, placement=placement, chunking=chunking, **{"drafting": "off", **more})


def run(work: Workload, where: Cluster, how: Policies, **more) -> SimulatedRun:
    reveal = how.ordering.type == "oracle_longest_first"
    return simulate(work, where, how, check=True, reveal=reveal, **more)


def conserved(work: Workload, got: SimulatedRun) -> bool:
    truth = {
        (step, f"{group.group_id}#{i}"): tokens
        for step, groups in enumerate(work.steps)
        for group in groups
        for i, tokens in enumerate(group.lengths)
    }
    ended = {(one.step, one.sample_id): one.tokens for one in got.ended}
    return len(got.ended) == len(truth) and ended == truth


@pytest.mark.slow
@pytest.mark.parametrize(("ordering", "placement"), [*product(ORDERINGS, ("least_kv", "cost_aware", "pinned"))])
def test_every_sample_ends_once_with_its_own_length(ordering, placement):
    """With and without chunks, pool and drafts; the core takes every event, and KV is never over-reserved."""
    for chunk, fetch_tokens_s, drafting, groups in (
        (None, 1e5, "off", 8),
        (37, 1e5, "goodput", 4),
        (200, 0.0, "off", 8),
    ):
        work, how = workload(groups=groups), policies(ordering, placement, chunk, drafting=drafting)
        got = run(work, cluster(2, fetch_tokens_s=fetch_tokens_s), how, acceptance=Even(0.6))
        assert conserved(work, got)
        assert sum(one.preemptions for one in got.ended) == 0
        assert all(one.tokens == pytest.approx(one.verifications + one.accepted) for one in got.ended)


def test_drafts_never_make_kv_run_full():
    """Two samples that fill a replica to the token with their last one, and draft up to it."""
    work = Workload("full", MAX_TOKENS, ((WorkloadGroup("g", 40, (MAX_TOKENS,) * 6),),))
    how = policies(chunk=None, drafting={"type": "fixed", "tokens": 15})
    for kv_tokens in (640 * 2, 640 * 2 + 2 * 16):
        assert conserved(work, run(work, cluster(kv_tokens=kv_tokens), how, acceptance=Even(0.95)))


@pytest.mark.parametrize("ordering", ["fcfs", "group_static"])
def test_without_reservations_replicas_preempt_and_still_conserve(ordering):
    work = workload(groups=12)
    got = run(work, cluster(kv_tokens=900, running=64), policies(ordering, chunk=None), admission=False)
    assert conserved(work, got)
    assert sum(one.preemptions for one in got.ended) > 5 and sum(one.recomputed_tokens for one in got.ended) > 500
    assert all(moment.kv_tokens <= 3 * 900 for moment in got.moments)


def test_the_same_seed_gives_the_same_run_and_another_one_other_outcomes():
    how = policies(drafting="aimd")
    first, second, other = (
        run(workload(), cluster(), how, acceptance=Even(0.7), seed=seed, spans=True) for seed in (1, 1, 2)
    )
    assert first == second and repr(first) == repr(second)
    assert first.ended != other.ended


@pytest.mark.slow
def test_so_it_is_in_another_process():
    code = "from test_sim_host import *\nprint(repr(run(workload(), cluster(), policies(drafting='aimd'), "
    code += "acceptance=Even(0.7), seed=1, spans=True)))"
    came = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    here = run(workload(), cluster(), policies(drafting="aimd"), acceptance=Even(0.7), seed=1, spans=True)
    assert came.stdout.strip() == repr(here)


def list_schedule(lengths: list[int], machines: int) -> int:
    """When the last job ends, each given to the machine that is free first."""
    free = [0] * machines
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


@pytest.mark.parametrize("seed", range(6))
def test_where_steps_cost_the_same_whatever_runs_it_is_list_scheduling(seed):
    """Then every place in a batch is a machine: first come, first served is exactly Graham's list schedule, and the
    oracle's is LPT, which is within 4/3 - 1/(3m) of the best and so of every other one."""
    work, places, replicas = workload(seed, groups=10), 2, 3
    model = ReplicaModel(StepModel(0.01, 0.0, 0.0), 1 << 20, places, 1e12, 0.0, 0.0)
    lengths = [tokens for group in work.steps[0] for tokens in group.lengths]
    fcfs = run(work, Cluster(model, replicas), policies("fcfs", chunk=None)).makespan_s
    oracle = run(work, Cluster(model, replicas), policies("oracle_longest_first", chunk=None)).makespan_s
    machines = places * replicas
    assert fcfs == pytest.approx(0.01 * list_schedule(lengths, machines))
    assert oracle == pytest.approx(0.01 * list_schedule(sorted(lengths, reverse=True), machines))
    assert oracle <= fcfs * (4 / 3 - 1 / (3 * machines))


@pytest.mark.parametrize("drafting", ["off", "goodput", "fixed"])
def test_nothing_is_faster_than_its_bounds(drafting):
    for seed, ordering in product(range(2), ("fcfs", "oracle_longest_first")):
        work, where, how = workload(seed), cluster(), policies(ordering, drafting=drafting)
        chances = None if drafting == "off" else Even(0.7)
        got = run(work, where, how, acceptance=chances)
        assert got.makespan_s >= bounds(work.steps[0], where, chances, how.drafting.max_draft_tokens)["best_s"]


def test_fixed_drafts_make_what_the_chances_say():
    chance, work = 0.6, workload()
    got = run(work, cluster(), policies(chunk=None, drafting={"type": "fixed", "tokens": 3}), acceptance=Even(chance))
    rate = 1 + chance + chance**2 + chance**3
    for one in got.ended:  # the last step of a sample may make more than is left
        assert one.tokens / rate <= one.verifications <= one.tokens / rate + 4
    long = [one for one in got.ended if one.tokens > 100]
    assert sum(one.drafted for one in long) / sum(one.verifications for one in long) == pytest.approx(3, rel=0.05)


def test_goodput_gains_where_drafts_are_right_and_loses_nothing_where_they_are_not():
    def makespan(chance, drafting):
        return run(workload(), cluster(), policies(drafting=drafting), acceptance=Even(chance)).makespan_s

    assert makespan(0.8, "goodput") < 0.5 * makespan(0.8, "off")
    assert makespan(0.01, "goodput") < 1.02 * makespan(0.01, "off")


def test_a_sample_that_moves_takes_its_kv_along_or_computes_it_again():
    def both(fetch_tokens_s):
        spans = []
        got = run(workload(groups=12), cluster(fetch_tokens_s=fetch_tokens_s), policies(), spans=True)
        spans = Counter(span.role for span in got.spans)
        return sum(one.moves for one in got.ended), sum(one.recomputed_tokens for one in got.ended), spans["fetch"]

    moves, recomputed, fetched = both(1e5)
    assert moves > 15 and recomputed == 0 and fetched >= moves
    moves, recomputed, fetched = both(0.0)
    assert moves > 20 and recomputed > 100 * moves and fetched == 0


def test_mates_on_one_replica_share_their_prompt():
    """Whole groups in one place: each prompt is computed once, and nothing else is."""
    got = run(workload(), cluster(), policies("group_static"), spans=True)
    computed = [(span.tokens, span.sample_id.split("#")[0]) for span in got.spans if span.role == "prefill"]
    assert sorted(computed) == [(30, f"g{i}") for i in range(8)]


def outcomes(names: list[str], seed: int, paces: int) -> dict[str, list[tuple]]:
    """What is drawn for chunks that run together, by sample."""
    drafting = policies(drafting="fixed").drafting
    way, found = Policied(drafting, Even(0.7), GPU, seed), {name: [] for name in names}
    chunks = [
        SimulatedChunk(name, SimulatedSample(GroupProgress(WorkloadGroup(name, 1, (99,)), 0), 0, 0.0), 99, 99, (0, 0))
        for name in names
    ]
    for _ in range(paces):
        for chunk, row in zip(chunks, way._outcomes(chunks, np.full(len(chunks), 0.7), 4), strict=True):
            found[chunk.chunk_id].append(tuple(row))
    return found


def test_outcomes_are_a_sample_s_own_and_new_ones_every_time():
    alone, together, reseeded = outcomes(["b"], 0, 50), outcomes(["a", "b"], 0, 50), outcomes(["b"], 1, 50)
    assert alone["b"] == together["b"] != together["a"]
    assert alone["b"] != reseeded["b"] and len(set(alone["b"])) > 40
    assert np.mean(outcomes(["b"], 0, 2_000)["b"]) == pytest.approx(0.7 / 0.3, rel=0.05), "geometric"


def test_steps_follow_each_other_and_a_group_may_come_again():
    work = workload(steps=3)
    got = run(work, cluster(), policies())
    assert conserved(work, got)
    for step in (1, 2):
        begins = {one.submitted_s for one in got.ended if one.step == step}
        assert begins == {max(one.ended_s for one in got.ended if one.step == step - 1)}


def test_moments_are_in_order_and_add_up():
    got = run(workload(groups=40), cluster(), policies())
    assert all(a.at_s < b.at_s for a, b in pairwise(got.moments))
    assert got.moments[0].running + got.moments[0].waiting == 160
    assert got.moments[0].running > 0, "chunks run from the first instant"
    assert got.moments[-1] == (got.makespan_s, 0, 0, 0, 3)
    assert max(moment.kv_tokens for moment in got.moments) <= 3 * 2_000
    assert all(moment.running for moment in got.moments[:-1]), "no hand-over is mistaken for a pause"


def test_moments_show_what_lasts_and_kv_that_grows_in_a_quiet_stretch():
    def look(at_s: float) -> Moment:
        running = 0 if at_s in handovers else 8
        return Moment(at_s, running, 0, int(10 * at_s), 1)

    handovers, series, now = set(), OccupancySeries(look), 0.0
    for _ in range(2_000):
        handovers.add(now + 5.0)  # all chunks end at once, and the next ones start 1 ms later
        series.note(now, now + 5.0)
        series.note(now + 5.0, now + 5.001)
        now += 5.001
    moments = series.all(now)
    lasted = {(a.running, b.at_s - a.at_s > 0.01) for a, b in pairwise(moments)}
    assert (0, True) not in lasted and len(moments) <= 2 * MOST
    steps = [b.kv_tokens - a.kv_tokens for a, b in pairwise(moments)]
    assert max(steps) <= 10 * 4 * now / MOST, "the greatest interval between two moments"


def test_a_lasting_state_replaces_one_that_did_not():
    series = OccupancySeries(lambda at_s: Moment(at_s, 0 if at_s == 1_000.0 else 8, 0, int(at_s), 1))
    for second in range(1_000):
        series.note(float(second), second + 1.0)
    series.note(1_000.0, 1_000.002)
    series.note(1_000.002, 1_100.0)
    after = [moment for moment in series.all(1_100.0) if moment.at_s >= 1_000.0]
    assert len(after) > 3 and all(moment.running == 8 for moment in after)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"where": cluster(kv_tokens=500)}, ValueError),
        ({"work": Workload("long", 10, (((WorkloadGroup("g", 5, (11,))),),))}, ValueError),
        ({"how": policies("oracle_longest_first"), "reveal": False}, IllegalEvent),
        ({"how": policies("seer"), "reveal": True}, IllegalEvent),
        ({"how": policies(racing="fastest_of_n")}, ValueError),
    ],
)
def test_what_cannot_be_simulated_is_refused(change, error):
    given = {"work": workload(), "where": cluster(), "how": policies(), "reveal": False, **change}
    with pytest.raises(error):
        simulate(given["work"], given["where"], given["how"], reveal=given["reveal"])


# ---- the checks can fail -------------------------------------------------------------------------------------


def begun() -> Checks:
    checks = Checks(reserves=True)
    checks.submit({"g#0": 20})
    checks.event(ev.ReplicaJoined(0.0, "r0", 16, 8, 4, 0, 0))
    checks.event(ev.SamplesSubmitted(1.0, "b", (ev.GroupSpec("g", 10, 1, 50),)))
    checks.action(start("g#0:0", 50))
    return checks


def start(chunk_id: str, tokens: int, copy_of: str | None = None, begin: int = 0) -> StartChunk:
    return StartChunk(chunk_id, "g#0", "r0", begin, tokens, 0, 0, 1, 50, (0, 0), "", copy_of, copy_of and "model")


def finish(now: float, tokens: int, chunk_id: str = "g#0:0", end=ev.ChunkEnd.STOP) -> ev.ChunkFinished:
    return ev.ChunkFinished(now, chunk_id, tokens, end, 0)


def raced() -> Checks:
    """And a copy of it runs."""
    checks = begun()
    checks.action(start("g#0:0~model", 50, "g#0:0"))
    return checks


@pytest.mark.parametrize(
    "breach",
    [
        lambda checks: checks.action(EndSample("g#0", SampleEnd.STOP, None, "")),
        lambda checks: (checks.event(finish(2.0, 19)), checks.action(EndSample("g#0", SampleEnd.STOP, None, ""))),
        lambda checks: checks.action(EndSample("g#0", SampleEnd.FAILED, "gone", "")),
        lambda checks: checks.event(finish(0.5, 20)),
        lambda checks: checks.action(start("g#0:1", 60)),
        lambda checks: checks.end(0),
        lambda checks: checks.submit({}),
        lambda checks: checks.action(start("g#0:1", 10)),
        lambda checks: checks.action(start("g#0:0~model", 10, "g#0:0", begin=3)),
        lambda checks: checks.action(start("g#0:0~model", 10, "g#0:9")),
    ],
)
def test_a_broken_law_is_found(breach):
    with pytest.raises(LawBroken):
        breach(begun())


@pytest.mark.parametrize("first", ["g#0:0", "g#0:0~model"])
def test_of_a_race_the_first_counts_and_the_other_does_not(first):
    checks = raced()
    checks.event(finish(2.0, 20, first))
    checks.action(EndSample("g#0", SampleEnd.STOP, None, ""))
    (other,) = {"g#0:0", "g#0:0~model"} - {first}
    checks.event(finish(3.0, 7, other, ev.ChunkEnd.ABORTED))
    checks.end(0)


def test_a_copy_that_gave_way_made_nothing():
    checks = raced()
    checks.event(finish(2.0, 7, "g#0:0~model", ev.ChunkEnd.ABORTED))
    with pytest.raises(LawBroken):
        checks.action(EndSample("g#0", SampleEnd.STOP, None, ""))


def test_a_kept_law_is_not():
    checks = begun()
    checks.event(finish(2.0, 20))
    checks.action(EndSample("g#0", SampleEnd.STOP, None, ""))
    checks.end(0)
    with pytest.raises(LawBroken):
        checks.end(1)
