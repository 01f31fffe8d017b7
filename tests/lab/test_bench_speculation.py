"""What the benchmarks of drafts and of steps make of their observations."""

import asyncio
from types import SimpleNamespace

import pytest

from tailrace.app import step_profile
from tailrace.app.errors import BadInput
from tailrace.app.files.figures import PICTURE
from tailrace.app.files.output_file import OutputFile
from tailrace.app.step_profile import MOST_TOKENS, fit, planner_step, points
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.messages.status import ReplicaStatus, ServiceSnapshot
from tailrace.lab.benchmarks.commands.bench import command
from tailrace.lab.benchmarks.live import speculation, static_baseline, tail
from tailrace.lab.benchmarks.live.pictures import acceptance_over_time
from tailrace.lab.benchmarks.live.speculation import BUDGETS, SpeculationLook, ratios, shares
from tailrace.lab.verification import leftovers
from tailrace.policies.families.draft_models import Planned
from tailrace.policies.families.registry import Policies, members


def look(at_s: float, waiting: int, running: tuple[int, ...], **work: int) -> SpeculationLook:
    replicas = tuple(
        ReplicaStatus(
            replica_id=str(i), ready=True, running=count, max_running=16, kv_used_share=0.0, weights_version=0,
            preemptions=0, work=work if i == 0 else {},
        )
        for i, count in enumerate(running)
    )  # fmt: skip
    known = {"waiting": waiting, "running": sum(running), "replicas": replicas}
    return SpeculationLook(at_s, ServiceSnapshot(**known, batches=(), observed_s=0.0, waits_for=None, policies={}))


def test_the_tail_is_where_nothing_waits_and_no_replica_runs_more_than_two():
    looks = [
        look(0, 3, (2, 2), tokens=0, verifications=0, step_us=0),
        look(1, 0, (3, 2), tokens=100, verifications=50, step_us=900_000, draft_us=10_000),
        look(2, 0, (2, 1), tokens=150, verifications=60, step_us=1_800_000, draft_us=20_000),
        look(4, 0, (1, 1), tokens=190, verifications=70, step_us=2_700_000, draft_us=27_000),
        look(5, 0, (0, 0), tokens=200, verifications=80, step_us=3_600_000, draft_us=36_000),
    ]
    found = shares(looks)
    assert found["tail_tokens_per_s"] == 20.0
    assert found["acceptance_length"] == 2.5
    assert found["draft_share"] == pytest.approx(36 / 3636, abs=1e-4)


def test_a_run_without_a_tail_or_tokens_says_so():
    found = shares([look(0, 0, (0,)), look(1, 0, (0,), tokens=0, verifications=0, step_us=0)])
    assert found == {"acceptance_length": None, "draft_share": None, "tail_tokens_per_s": None}


def test_ratios_are_above_one_where_goodput_is_faster():
    runs = {name: {"makespan_s": 20.0, "tail_tokens_per_s": 10.0} for name in BUDGETS}
    runs["goodput"] = {"makespan_s": 10.0, "tail_tokens_per_s": 15.0}
    runs["fixed_4"]["makespan_s"] = 12.0
    found = ratios(runs)
    assert found["goodput_to_best_fixed"] == 1.2 and found["tail_speedup"] == 1.5 and found["speedup"]["off"] == 2.0
    runs["off"]["tail_tokens_per_s"] = None
    assert ratios(runs)["tail_speedup"] is None


def test_every_drafting_policy_is_benchmarked():
    tried = {Policies(drafting=budget).drafting.type for budget in BUDGETS.values()}
    assert tried == set(members("drafting"))


def test_the_picture_is_drawn(tmp_path):
    looks = [look(i, 0, (2,), tokens=20 * i, verifications=10 * i, step_us=i) for i in range(1, 30)]
    runs = {"off": {"makespan_s": 30.0, "tail_s": 3.0}, "goodput": {"makespan_s": 20.0, "tail_s": 2.0}}
    for name in ("picture.png", "picture.svg"):
        acceptance_over_time(OutputFile(tmp_path / name, "--plot", PICTURE), runs, {"goodput": looks, "off": looks[:2]})
        assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize(
    ("plot", "drafts", "mend"),
    [("a.png", False, "--drafts"), ("a.jpeg", True, ".png"), ("nowhere/a.png", True, "folder")],
)
def test_a_bad_plot_is_refused_before_anything_starts(plot, drafts, mend, tmp_path):
    arguments = ["live", "--trace", "none.jsonl", "--plot", str(tmp_path / plot)] + ["--drafts"] * drafts
    with pytest.raises(BadInput, match=mend):
        command.main(arguments, standalone_mode=False)


def test_points_stay_within_what_the_engine_runs():
    for max_running, max_context in ((1, 256), (16, 4096)):
        grid = points(max_running, max_context)
        assert all(chunks <= max_running and context < max_context for chunks, _, context in grid)
        assert all(chunks * (1 + drafts) <= MOST_TOKENS for chunks, drafts, _ in grid)
        assert len(set(grid)) == len(grid) and (1, 0, 32) in grid


class SlowPrompts:
    """In the place of a Stepper whose steps compute at most 512 tokens: a step takes 1 ms, and 1 ms per 512 of them."""

    def __init__(self, monkeypatch):
        self.left, self.made, self.limits, self.now_s, self.drafts = {}, {}, {}, 0.0, []
        monkeypatch.setattr(step_profile, "_stepper", self)
        clock = SimpleNamespace(perf_counter=lambda: self.now_s, monotonic=lambda: self.now_s)
        monkeypatch.setattr(step_profile, "time", clock)

    busy = False

    def reset_cache(self):
        self.left, self.made = {}, {}

    def add(self, chunk, submitted_s):
        name = chunk.chunk_id
        self.left[name], self.made[name], self.limits[name] = chunk.prompt_tokens, [], chunk.max_tokens

    def peek(self, name):
        return self.made.get(name, [])

    def draft_for_all(self, draft):
        self.drafts.append(draft)

    def step(self):
        room = 512
        for name in self.made:
            count = min(room, self.left[name] or 1)
            room -= count
            self.left[name] = max(0, self.left[name] - count)
            self.made[name] += [1] * (count > 0 and not self.left[name])
        self.now_s += (1 + (512 - room) / 512) / 1e3
        ended = [name for name in self.made if len(self.made[name]) == self.limits[name]]
        return [(name, self.made.pop(name)) for name in ended]


def test_a_prompt_of_several_steps_takes_all_of_them(monkeypatch):
    """Only its first step counted: 1024 tokens were as fast as 512."""
    SlowPrompts(monkeypatch)
    assert step_profile._prefill_ms(512) == 2.0 and step_profile._prefill_ms(1024) == 4.0


def test_only_steps_in_which_all_chunks_decode_count(monkeypatch):
    """The median was of steps that computed other chunks' prompts."""
    stepper = SlowPrompts(monkeypatch)
    assert step_profile._step_ms(1, 0, 2048) == round(1 + 1 / 512, 3)
    assert step_profile._step_ms(2, 0, 2048) == round(1 + 2 / 512, 3)
    assert step_profile._step_ms(4, 0, 2048) is None, "the first chunk has ended before the last one's first token"
    assert stepper.drafts[-1] == [] and not stepper.made


def test_the_fit_finds_the_line_behind_the_points():
    steps = [
        {"chunks": c, "draft_tokens": d, "context_tokens": x, "step_ms": 20 + 2 * c * (1 + d) + 0.01 * c * x}
        for c, d, x in points(16, 4096)
    ]
    assert fit(steps) == pytest.approx({"base_ms": 20, "per_token_ms": 2, "per_context_token_us": 10}, rel=1e-3)


def test_a_profile_gives_the_planner_s_figures_by_their_names():
    found = {"base_ms": 20.0, "per_token_ms": 2.0, "per_context_token_us": 10.0}
    drafter, verifier = planner_step(found, 500, drafts=True), planner_step(found, 500, drafts=False)
    assert drafter == {"base_s": 0.02, "sample_s": 0.007}
    assert verifier == {"base_s": 0.02, "sample_s": 0.005, "token_s": 0.002}
    Planned(drafter=drafter, verifier=verifier)
    noisy = dict.fromkeys(found, -0.1)
    Planned(drafter=planner_step(noisy, 500, drafts=True), verifier=planner_step(noisy, 500, drafts=False))


class OneRollout:
    """A client that records the calls of a run."""

    def __init__(self):
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        async def call(*_):
            self.calls.append(name)

        return call

    async def rollout(self, _batch):
        self.calls.append("rollout")
        await asyncio.sleep(0.05)
        yield "group"


async def fails(*_):
    raise RuntimeError("the service does not answer")


def test_a_run_whose_watcher_failed_gives_no_figures(monkeypatch):
    """It would be the figures of the looks until then."""
    client, group = OneRollout(), PromptGroup(prompt_id="p", token_ids=(1,), samples=1)
    client.status, batch = fails, RolloutBatch(batch_id="b", groups=(group,))
    monkeypatch.setattr(speculation, "LOOK_S", 0.01)
    monkeypatch.setattr(leftovers, "SETTLE_S", 0.0)
    for module in (speculation, leftovers, tail):
        monkeypatch.setattr(module, "summarise", lambda _: {"tokens": 1, "moved_samples": 0, "makespan_s": 1.0})
    monkeypatch.setattr(tail, "_all_up", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(tail, "_listen", fails)
    replay = tail.Replay(batch.groups, (), [{"epochs": [{"policy_step": 0}]}], None)
    runs = (
        lambda: speculation._roll(client, "r", Policies(), batch.groups),
        lambda: leftovers._roll(client, batch.groups, lambda _: None),
        lambda: tail._roll(Answering(), "r", replay, 2),
    )
    for run in runs:
        with pytest.raises(RuntimeError, match="does not answer"):
            asyncio.run(run())


class Answering(OneRollout):
    """A client whose service has one replica."""

    async def status(self):
        return SimpleNamespace(replicas=[SimpleNamespace(max_running=1)])


def test_a_run_of_bench_live_knows_no_lengths_of_the_run_before(monkeypatch):
    """All runs replay the same answers: in history they would be the truth."""
    monkeypatch.setattr(static_baseline, "summarise", lambda groups: dict.fromkeys(static_baseline.KEPT, len(groups)))
    group = PromptGroup(prompt_id="p", token_ids=(1,))
    client = OneRollout()
    found = asyncio.run(static_baseline._roll(client, "seer-0", Policies(), (group,)))
    assert found["makespan_s"] == 1 and client.calls[-1] == "rollout"
    assert {"reset_caches", "forget_history"} <= set(client.calls)
