"""The bookkeeping of a soak: its faults, its answers, its memory, its page. The soak itself is in tests/live."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from waiting import is_alive as lives
from waiting import until

from tailrace.app.cli import run
from tailrace.app.files.prompts import read_prompts
from tailrace.deployments.messages.rollout import GroupResult, SampleResult, Segment
from tailrace.deployments.messages.status import BatchStatus, ServiceSnapshot
from tailrace.lab.demo import PROMPTS
from tailrace.lab.soak.answers import AnswerBook, Stretch
from tailrace.lab.soak.crossings import judge, request
from tailrace.lab.soak.driver_process import DriverProcess
from tailrace.lab.soak.faults import KINDS as KINDS_OF_FAULTS
from tailrace.lab.soak.memory import ProcessLog, mb_per_hour
from tailrace.lab.soak.page import page
from tailrace.lab.soak.processes import Reading, is_alive, read_all, role_of
from tailrace.lab.soak.report import faults_of, lines, memory_rows
from tailrace.lab.soak.run import LiveSoak, SoakPlan
from tailrace.lab.soak.schedule import Strike, strikes
from tailrace.lab.soak.scripts import EVALUATOR, TRAINER, scripts_of
from tailrace.lab.soak.watch import ServiceWatch
from tailrace.policies.protocol.actions import SampleEnd

KINDS = ("a", "b", "c")
FOLDERS = ("zero", "one", "two")
TOKENS = 8


def test_faults_are_a_function_of_the_seed_and_each_kind_comes_once_a_round():
    first, again = list(strikes(7, 1000, KINDS)), list(strikes(7, 1000, KINDS))
    assert first == again != list(strikes(8, 1000, KINDS))
    gaps = [late.at_s - early.at_s for early, late in itertools.pairwise(first)]
    assert min(gaps) >= 20 and max(gaps) <= 60 and first[-1].at_s < 1000
    rounds = [tuple(one.kind for one in first[at : at + 3]) for at in range(0, len(first) - 2, 3)]
    assert all(sorted(each) == list(KINDS) for each in rounds) and len(set(rounds)) > 1
    assert all(0 <= one.place < 1 for one in first)


@pytest.fixture
def scripts():
    return scripts_of(read_prompts(PROMPTS, {"samples": 1, "max_tokens": 1}), FOLDERS, "tailrace")


def test_every_batch_of_the_trainer_meets_every_folder_and_the_evaluator_takes_any_weights(scripts):
    trainer, evaluator = scripts
    met = {(number % len(trainer.batches), trainer.version(number) % len(FOLDERS)) for number in range(12)}
    assert len(met) == len(trainer.batches) * len(FOLDERS)
    assert trainer.batch(5).weights_version == trainer.version(5) == 5 and trainer.folder(5) == "two"
    assert evaluator.batch(5).weights_version is None and evaluator.version(5) is None
    assert trainer.batch(3).batch_id == "soak-trainer-3" != evaluator.batch(3).batch_id
    assert type(trainer).model_validate_json(trainer.model_dump_json()) == trainer


def answer(index: int, pieces: list[tuple[int, int]], salt: int = 0, **changes) -> SampleResult:
    """`pieces`: version and number of tokens. A token depends on sample, position and the version's weights."""
    tokens, segments = [], []
    for version, count in pieces:
        weights, start = version % len(FOLDERS), len(tokens)
        tokens += [1000 * weights + 100 * index + salt + at for at in range(start, start + count)]
        segments.append(
            Segment(
                weights_version=version, weights_digest=FOLDERS[weights], replica_id="r", start=start, end=len(tokens)
            )
        )
    logprobs = tuple(-float(token) for token in tokens)
    made = SampleResult(
        sample_index=index, token_ids=tuple(tokens), text="", logprobs=logprobs, raw_logprobs=logprobs,
        finish_reason=SampleEnd.LENGTH, segments=tuple(segments),
    )  # fmt: skip
    return made.model_copy(update=changes)


def groups_of(script, number: int, pieces: list[tuple[int, int]]) -> list[GroupResult]:
    batch = script.batch(number)
    return [
        GroupResult(
            batch_id=batch.batch_id,
            prompt_id=group.prompt_id,
            prompt_token_ids=(1, 2, 3),
            samples=tuple(answer(index, pieces) for index in range(group.samples)),
        )
        for group in batch.groups
    ]


@pytest.fixture
def book(scripts) -> AnswerBook:
    made = AnswerBook(scripts, len(FOLDERS))
    for script in scripts:
        for number in range(len(script.batches)):
            for weights in range(len(FOLDERS)):
                made.learn(script.name, number, weights, groups_of(script, number, [(weights, TOKENS)]))
    return made


def deliver(book: AnswerBook, name: str, number: int, groups: list[GroupResult], ends: bool = True) -> None:
    book.hear(name, {"event": "began", "batch": number})
    for group in groups:
        event = {"event": "group", "batch": number, "group": group.model_dump(mode="json")}
        book.hear(name, json.loads(json.dumps(event)))
    if ends:
        book.hear(name, {"event": "ended", "batch": number})


def changed(groups: list[GroupResult], **changes) -> list[GroupResult]:
    """The last sample of the first group differs."""
    *others, last = groups[0].samples
    return [groups[0].model_copy(update={"samples": (*others, last.model_copy(update=changes))}), *groups[1:]]


def test_right_answers_count_and_nothing_is_wrong_or_lost(book, scripts):
    trainer, evaluator = scripts
    deliver(book, TRAINER, 2, groups_of(trainer, 2, [(4, TOKENS)]))
    deliver(book, EVALUATOR, 1, groups_of(evaluator, 1, [(4, TOKENS)]))
    assert book.counts["samples"] == 16 + 6 and book.counts["tokens"] == TOKENS * 22 and book.counts["batches"] == 2
    assert not book.wrong and not book.counts["lost"] and not book.crossed and not book.failed


@pytest.mark.parametrize("kind", ["token", "logprob", "end", "weights"])
def test_a_difference_is_found_and_named(book, scripts, kind):
    _, evaluator = scripts
    right = answer(1, [(4, TOKENS)])
    changes = {
        "token": {"token_ids": (*right.token_ids[:5], right.token_ids[5] ^ 1, *right.token_ids[6:])},
        "logprob": {"logprobs": (*right.logprobs[:5], right.logprobs[5] + 0.01, *right.logprobs[6:])},
        "end": {"finish_reason": SampleEnd.STOP},
        "weights": {"segments": (right.segments[0].model_copy(update={"weights_digest": "another"}),)},
    }[kind]
    deliver(book, EVALUATOR, 1, changed(groups_of(evaluator, 1, [(4, TOKENS)]), **changes))
    (wrong,) = book.wrong
    assert wrong["batch_id"] == "soak-evaluator-1" and wrong["sample_index"] == 1
    assert wrong["what"] == {"logprob": "logprobs"}.get(kind, kind)
    assert wrong["position"] == {"token": 5, "logprob": 5, "end": TOKENS, "weights": 0}[kind]


def test_tokens_of_other_weights_than_their_version_are_wrong(book, scripts):
    groups = groups_of(scripts[1], 0, [(4, TOKENS)])
    other = answer(1, [(5, TOKENS)])
    deliver(book, EVALUATOR, 0, changed(groups, token_ids=other.token_ids))
    assert [one["position"] for one in book.wrong] == [0]


def test_tokens_of_weights_before_those_of_the_batch_are_wrong(book, scripts):
    assert scripts[0].batch(2).weights_version == 4
    deliver(book, TRAINER, 2, groups_of(scripts[0], 2, [(3, TOKENS)]))
    assert [(one["position"], one["what"]) for one in book.wrong] == [(0, "weights")] * 16


def test_a_batch_that_ends_without_a_group_or_a_sample_loses_them(book, scripts):
    groups = groups_of(scripts[1], 0, [(4, TOKENS)])
    short = groups[0].model_copy(update={"samples": groups[0].samples[:1]})
    deliver(book, EVALUATOR, 0, [short, groups[1]])
    assert book.counts["lost"] == 1 + 2 and book.counts["samples"] == 3


def test_a_driver_that_comes_back_gets_the_rest_and_each_sample_counts_once(book, scripts):
    groups = groups_of(scripts[1], 0, [(4, TOKENS)])
    deliver(book, EVALUATOR, 0, groups[:2], ends=False)
    assert book.unfinished == 2
    deliver(book, EVALUATOR, 0, groups)
    assert book.counts["lost"] == 0 and book.counts["samples"] == 6 and book.counts["repeated"] == 4
    assert not book.unfinished


def test_a_failed_sample_is_counted_by_reason_and_its_tokens_are_compared(book, scripts):
    part = answer(1, [(4, 3)], finish_reason=SampleEnd.FAILED, error="5 replicas were lost")
    kinds = ("token_ids", "logprobs", "raw_logprobs", "segments", "finish_reason", "error")
    changes = {kind: getattr(part, kind) for kind in kinds}
    deliver(book, EVALUATOR, 0, changed(groups_of(scripts[1], 0, [(4, TOKENS)]), **changes))
    assert book.failed == Counter({"failed: 5 replicas were lost": 1}) and not book.wrong and not book.counts["lost"]
    deliver(book, EVALUATOR, 2, changed(groups_of(scripts[1], 2, [(4, TOKENS)]), **changes | {"token_ids": (7, 8, 9)}))
    assert len(book.wrong) == 1


def test_updates_and_errors_of_drivers_are_counted(book):
    for version in (3, 3, 4):
        book.hear(TRAINER, {"event": "updated", "version": version})
    book.hear(TRAINER, {"event": "error", "text": "RolloutRejected: no"})
    assert book.counts["updates"] == 2 and book.errors == ["trainer: RolloutRejected: no"]


def crossed_sample(book, scripts, pieces):
    groups = groups_of(scripts[1], 0, [(4, TOKENS)])
    made = answer(1, pieces)
    kinds = ("token_ids", "logprobs", "raw_logprobs", "segments")
    deliver(book, EVALUATOR, 0, changed(groups, **{kind: getattr(made, kind) for kind in kinds}))
    return book.crossed


def test_a_crossing_sample_is_compared_up_to_the_update_and_its_rest_is_asked_for_again(book, scripts):
    (crossed,) = crossed_sample(book, scripts, [(4, 3), (5, 3), (6, 2)])
    assert not book.wrong and crossed.stretches == (Stretch(1, 0, 3), Stretch(2, 3, 6), Stretch(0, 6, 8))
    wanted = next(group for group in crossed.batch.groups if group.prompt_id == crossed.group.prompt_id)
    middle, last = (request(crossed, stretch, "again") for stretch in crossed.stretches[1:])
    assert middle.groups[0].token_ids == (1, 2, 3, *crossed.sample.token_ids[:3]) and middle.groups[0].samples == 2
    assert middle.groups[0].max_tokens == 3 and last.groups[0].max_tokens == wanted.max_tokens - 6
    assert (middle.seed, middle.step) == (crossed.batch.seed, crossed.batch.step)


def test_a_crossing_sample_with_a_wrong_token_before_the_update_is_wrong(book, scripts):
    groups = groups_of(scripts[1], 0, [(4, TOKENS)])
    made = answer(1, [(4, 3), (5, 5)])
    tokens = (made.token_ids[0], made.token_ids[1] ^ 1, *made.token_ids[2:])
    deliver(book, EVALUATOR, 0, changed(groups, token_ids=tokens, segments=made.segments))
    assert [one["position"] for one in book.wrong] == [1]


@pytest.mark.parametrize(("flipped", "wrong"), [(None, []), (1, [4])])
def test_the_rest_of_a_crossing_sample_is_judged_by_the_fresh_one(book, scripts, flipped, wrong):
    (crossed,) = crossed_sample(book, scripts, [(4, 3), (5, 5)])
    stretch = crossed.stretches[1]
    tokens = list(crossed.sample.token_ids[3:])
    if flipped is not None:
        tokens[flipped] ^= 1
    part = {kind: getattr(crossed.sample, kind)[3:] for kind in ("logprobs", "raw_logprobs")}
    fresh = crossed.sample.model_copy(update={**part, "token_ids": tuple(tokens)})
    judge(book, crossed, stretch, crossed.group.model_copy(update={"samples": (fresh,)}))
    assert [one["position"] for one in book.wrong] == wrong


def test_a_reference_with_a_failed_sample_or_of_other_weights_is_refused(book, scripts):
    with pytest.raises(ValueError, match="is broken"):
        book.learn(EVALUATOR, 0, 1, groups_of(scripts[1], 0, [(2, TOKENS)]))


def reading(pid: int, megabytes: float, files: int = 9, role: str = "Engine") -> Reading:
    return Reading(pid=pid, born=pid, role=role, rss_bytes=int(megabytes * 1e6), files=files)


def test_memory_is_reported_from_after_the_warm_up_with_the_slope_of_the_second_half():
    log = ProcessLog()
    for minute in range(61):
        growing = reading(1, 100 + (50 if minute < 3 else 60 + minute), files=9 + minute)
        log.add(60.0 * minute, [growing, *([reading(2, 500)] if minute < 30 else [])])
    report = log.report(warm_s=180.0)
    (row,) = report["processes"]
    assert (row["start_mb"], row["end_mb"], row["start_files"], row["end_files"]) == (163.0, 220.0, 12, 69)
    assert row["mb_per_hour"] == pytest.approx(60.0) and report["ended"] == {"Engine": 1}
    assert list(log.curves()) == ["Engine 1", "Engine 2"] and len(log.curves()["Engine 2"]) == 30


def test_two_minutes_are_needed_for_a_slope():
    assert mb_per_hour([(float(at), 1_000_000 * at, 1) for at in range(0, 100, 5)]) is None
    assert mb_per_hour([(float(at), 1_000_000 * at, 1) for at in range(0, 130, 5)]) == pytest.approx(3600)


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["ray::ServeReplica:tailrace:Engine"], "Engine"),
        (["ray::ServeReplica:tailrace:Drafter.initialize_and_get_metadata"], "Drafter (starts)"),
        (["ray::ServeController.listen_for_change"], "ServeController"),
        (["ray::ShardActor"], "ShardActor"),
        (["ray::IDLE"], "IDLE"),
        (["/x/mooncake/mooncake_master", "-rpc_port=1"], "mooncake_master"),
        (["/x/python", "-m", "tailrace.lab.soak.driver", "/tmp/a/trainer.json", "h:1", "0"], "driver trainer"),
        (["/x/python3.11", "-u", "/x/ray/log_monitor.py", "--session"], "log_monitor"),
    ],
)
def test_a_process_has_a_role(command, role):
    assert role_of(command) == role


def test_processes_are_this_one_and_its_children():
    runs = "import time; print('runs', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", runs], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"runs\n"  # read before that, its memory is that of an exec half done
        found = {one.pid: one for one in read_all()}
        assert "soak" in {one.role for one in found.values()}
        one = found[child.pid]
        assert one.role.startswith("python")
        assert one.rss_bytes > 1e6 and one.files >= 3 and is_alive(one.pid, one.born)
        assert not is_alive(one.pid, one.born + 1)
    finally:
        child.kill()
    until(lambda: not lives(child.pid))
    assert not is_alive(one.pid, one.born)  # not waited for yet, and no process any more
    child.communicate()


def test_a_service_that_is_gone_at_the_last_check_leaves_the_report(scripts):
    class Gone:
        async def status(self):
            raise TimeoutError("the coordinator\ndoes not answer")

    async def check() -> dict:
        live = LiveSoak(Gone(), scripts, FOLDERS, SoakPlan(1.0, 0, ("replica_killed",), (1.0, 2.0)), print)
        return await live._check_crossed(asyncio.Event())

    crossed = asyncio.run(check())
    assert crossed == {
        "samples": 0, "checked": 0, "unchecked": 0, "error": "TimeoutError: the coordinator does not answer"
    }  # fmt: skip


def test_a_fault_that_cannot_be_done_is_not_one_that_found_nothing_to_disturb(scripts, monkeypatch):
    async def forbidden(_scene):
        raise PermissionError(1, "cannot stop thread 7 by ptrace")

    monkeypatch.setitem(KINDS_OF_FAULTS, "engine_frozen", forbidden)
    live = LiveSoak(None, scripts, FOLDERS, SoakPlan(1.0, 0, ("engine_frozen",), (1.0, 2.0)), print)
    drivers = {EVALUATOR: SimpleNamespace(kill=lambda: False)}
    for kind in ("engine_frozen", "engine_frozen", "evaluator_killed"):
        asyncio.run(live._act(Strike(1.0, kind, 0.5), drivers))
    made = live._report(60.0, False, 0, {})
    assert (made["faults"], made["faults_without_a_victim"]) == ({}, 1)
    ((said, count),) = made["faults_that_failed"].items()
    assert count == 2 and said.startswith("engine_frozen: PermissionError: ")
    assert f"fault failed: 2 {said}" in lines(report(faults_that_failed=made["faults_that_failed"]))


def status(tokens: int, contained: dict | None = None) -> ServiceSnapshot:
    batch = BatchStatus(batch_id="b", samples=1, ended=0, groups=1, emitted=0, tokens=tokens, tail=False, seconds=1.0)
    quiet = {"waiting": 0, "running": 1, "replicas": (), "observed_s": 0.0, "waits_for": None, "policies": {}}
    return ServiceSnapshot(batches=(batch,), contained=contained or {}, **quiet)


def test_silence_rates_and_contained_errors_over_a_lost_coordinator():
    watch = ServiceWatch()
    for at_s, tokens, contained in (
        (1, 10, {"tick.E": 2}),
        (6, 110, {"tick.E": 3}),
        (30, 40, {"tick.E": 1}),
        (32, 90, {}),
    ):
        watch.look(at_s, status(tokens, contained))
    assert watch.longest_silence_s(33) == 26 and watch.contained == {"tick.E": 4}
    assert watch.longest_silence_s(3600) == 3568, "the service has been silent since then"
    assert watch.rates[0] == (6, pytest.approx(110 / 6))
    watch.miss(TimeoutError())
    assert watch.failures == {"TimeoutError": 1}


def test_tokens_that_a_new_coordinator_has_from_the_log_are_not_made_again():
    watch = ServiceWatch()
    for at_s, tokens in ((1, 100), (6, 200), (10, None), (20, 200), (25, 230)):
        seen = status(tokens or 0)
        watch.look(at_s, seen if tokens else seen.model_copy(update={"batches": ()}))
    assert watch.longest_silence_s(25) == 19 and sum(rate > 0 for _, rate in watch.rates) == 2
    assert watch.rates[-1] == (25, pytest.approx(6.0))


def report(**changes) -> dict:
    log = ProcessLog()
    for at_s in range(0, 400, 5):
        log.add(float(at_s), [reading(1, 900), reading(2, 50, role="raylet")])
    strike = {"at_s": 20.0, "kind": "replica_killed", "happened": True, "note": "replica <b>"}
    return {
        "seconds": 400.0, "seed": 0, "stopped": False, "batches": 3, "samples": 40, "tokens": 4000, "lost": 0,
        "repeated": 2, "updates": 1, "unfinished": 0, "wrong": 0, "failed": {}, "first_wrong": [], "driver_errors": [],
        "crossed": {"samples": 4, "checked": 4, "unchecked": 0}, "faults": {"replica_killed": 1},
        "faults_without_a_victim": 0, "faults_that_failed": {}, "longest_silence_s": 12.0,
        "contained": {}, "status_failures": {}, "memory": log.report(180.0),
        "strikes": [strike], "tokens_per_s": [(5.0, 80.0), (10.0, 90.0)], "rss": log.curves(), "left_over": 0,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"lost": 2}, ["2 samples lost"]),
        ({"wrong": 1}, ["1 samples wrong"]),
        ({"failed": {"failed: no": 3}}, ["3 failed: failed: no"]),
        ({"driver_errors": ["trainer: x"]}, ["driver error: trainer: x"]),
        ({"left_over": 1}, ["1 processes left over"]),
        (
            {"crossed": {"samples": 4, "checked": 0, "unchecked": 4, "error": "TimeoutError: no"}},
            ["the check of the samples that crossed an update ended: TimeoutError: no"],
        ),
        ({"samples": 0}, ["no sample has ended"]),
    ],
)
def test_the_report_says_what_is_not_well(changes, said):
    assert faults_of(report(**changes)) == said


def test_the_page_and_the_tables_show_the_report_and_escape_it():
    made = page(report())
    assert made.count("<svg") == 3 and "replica_killed: replica &lt;b&gt;" in made and "<b>" not in made
    assert "4,000" in lines(report())[1] and [row[0] for row in memory_rows(report())] == ["role", "Engine", "raylet"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kinds", "replica_killed,nothing"], "--kinds nothing: known: replica_killed"),
        (["--gap-s", "5", "2"], "--gap-s 5 2"),
        (["--minutes", "0"], "minutes"),
        (["--out", "/proc/soak"], "--out /proc/soak: cannot be made"),
    ],
)
def test_bad_input_is_one_line_and_nothing_starts(arguments, said, capsys):
    assert run(["soak", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


DRIVER = """
import json, sys, time
say = lambda **event: print(json.dumps(event), flush=True)
file, _, first, rest = sys.argv[1:]
number = int(first)
while True:
    say(event="began", batch=number)
    time.sleep(600 if number > int(first) else 0)  # the second batch runs until its driver is killed
    print("a line of a library", flush=True)
    say(event="ended", batch=number)
    if rest == "once":
        break
    number += 1
"""


async def until_soon(holds, seconds: float = 1.0) -> None:
    """Returns once `holds()`, or after some seconds."""
    for _ in range(int(100 * seconds)):
        if holds():
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("os.abort()", ["its process ended with status -6: no memory"]),
        ("""print(json.dumps({"event": "error", "text": "refused"}), flush=True); sys.exit(1)""", ["refused"]),
        ("time.sleep(600)", []),
    ],
)
def test_a_driver_that_dies_unexplained_is_an_error(ends, said, scripts, tmp_path, monkeypatch):
    code = f"import json, os, sys, time; print('no memory', file=sys.stderr, flush=True); {ends}"
    monkeypatch.setattr("tailrace.lab.soak.driver_process.MODULE", ("-c", code))
    monkeypatch.setattr("tailrace.lab.soak.driver_process.AGAIN_S", 600.0)
    heard = []
    driver = DriverProcess(scripts[0], "here", tmp_path, lambda _, event: heard.append(event["text"]))
    errors = tmp_path / f"{TRAINER}.stderr"

    async def drive():
        running = asyncio.create_task(driver.run())
        await until_soon(lambda: errors.exists() and errors.read_text(), 60.0)
        if not said:
            assert driver.kill()
        await until_soon(lambda: driver.pid is None, 60.0)
        await until_soon(lambda: heard)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(drive())
    assert heard == said


@pytest.mark.slow
def test_a_killed_driver_comes_back_with_its_batch_and_the_last_batch_ends(scripts, tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr("tailrace.lab.soak.driver_process.MODULE", ("-c", DRIVER))
    driver = DriverProcess(scripts[0], "here", tmp_path, lambda name, event: heard.append((name, event)))

    def numbers(kind: str) -> list[int]:
        return [event["batch"] for _, event in heard if event["event"] == kind]

    async def drive():
        running = asyncio.create_task(driver.run())
        while not numbers("ended"):
            await asyncio.sleep(0.01)
        while len(numbers("began")) == len(numbers("ended")):
            await asyncio.sleep(0.01)
        assert driver.kill()
        driver.finish()
        await asyncio.wait_for(running, 60)

    asyncio.run(drive())
    assert {name for name, _ in heard} == {TRAINER} and driver.pid is None
    began, ended = numbers("began"), numbers("ended")
    assert began[-1] == began[-2] == ended[-1] and sorted(set(began)) == ended
