"""The certificate finds every kind of difference, and names sample and position."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
from safetensors.numpy import save_file

from tailrace.app.cli import run as command
from tailrace.app.cluster import declared
from tailrace.app.config import DEFAULT_CONFIG, ServeFile, load_config, with_engine
from tailrace.app.errors import BadInput, Failed
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch, SampleResult, Segment
from tailrace.deployments.staging.adapter_folder import adapter_digest, misfit
from tailrace.deployments.staging.safetensors_header import read_header
from tailrace.kvpool.pool_config import PoolConfig
from tailrace.lab.commands import verify
from tailrace.lab.commands.verify import _at_level, _chosen, _to_corrupt
from tailrace.lab.verification import (
    chaos,
    disturbances,
    finished,
    frozen_thread,
    leftovers,
    restarted_head,
    tokens,
    trajectories,
    weights_update,
)
from tailrace.lab.verification.adapters import TENSORS, make_adapter
from tailrace.lab.verification.closeness import sentences
from tailrace.lab.verification.frozen_thread import busiest_thread, processes_titled
from tailrace.lab.verification.runs import DRAFTED, LORA, RUNS, TWO
from tailrace.lab.verification.services import Service
from tailrace.lab.verification.tokens import TOLERANCE, certificate, compare, corrupt
from tailrace.policies.families.registry import Policies, members
from tailrace.policies.protocol.actions import SampleEnd


def rollout(**changes) -> list[GroupResult]:
    samples = [
        SampleResult(
            sample_index=i, token_ids=(10, 11, 12, 13), text="", logprobs=(-1.0, -2.0, -3.0, -4.0),
            raw_logprobs=(-1.5, -2.5, -3.5, -4.5), finish_reason=SampleEnd.STOP,
        )
        for i in range(2)
    ]  # fmt: skip
    samples[1] = samples[1].model_copy(update=changes)
    return [GroupResult(batch_id="b", prompt_id="p", prompt_token_ids=(1,), samples=tuple(samples))]


def test_the_same_is_the_same_in_any_order():
    groups = rollout()
    other = [groups[0].model_copy(update={"samples": groups[0].samples[::-1]})]
    result = compare(groups, other)
    assert result["identical"] and result["first_difference"] is None
    assert result["max_logprob_difference"] == result["mean_logprob_difference"] == 0.0


@pytest.mark.parametrize(
    "changes, position, what",
    [
        ({"token_ids": (10, 11, 99, 13)}, 2, "token"),
        ({"token_ids": (10, 11, 12)}, 3, "end"),
        ({"finish_reason": SampleEnd.LENGTH}, 4, "end"),
        ({"logprobs": (-1.0, -2.0 - 2 * TOLERANCE, -3.0, -4.0)}, 1, "logprobs"),
        ({"raw_logprobs": (-1.5, -2.5, -3.5, float("nan"))}, 3, "raw_logprobs"),
    ],
)
def test_a_difference_is_named_by_sample_and_position(changes, position, what):
    result = compare(rollout(), rollout(**changes))
    assert not result["identical"]
    first = result["first_difference"]
    assert (first["prompt_id"], first["sample_index"], first["position"], first["what"]) == ("p", 1, position, what)


def test_noise_below_the_tolerance_is_reported_but_no_difference():
    result = compare(rollout(), rollout(logprobs=(-1.0, -2.00005, -3.0, -4.0)))
    assert result["identical"]
    assert result["max_logprob_difference"] == pytest.approx(5e-5)
    assert 0 < result["mean_logprob_difference"] < 5e-5


def test_a_missing_sample_is_a_difference():
    groups = rollout()
    fewer = [groups[0].model_copy(update={"samples": groups[0].samples[:1]})]
    assert compare(groups, fewer)["first_difference"]["what"] == "missing"


def test_a_run_without_a_group_is_one_whose_samples_are_missing():
    nothing = done([])
    assert tokens.line(nothing) == "0 tokens, 0 pulled"
    found = certificate({"plain": done(rollout()), "chunks_of_64": nothing})
    assert not found["holds"] and found["runs"][1]["first_difference"]["what"] == "missing"
    assert [run["tokens"] for run in found["runs"]] == [8, 0]


@pytest.mark.parametrize("exactness", ["bits", "law"])
def test_a_sample_that_comes_twice_or_that_nobody_asked_for_is_a_difference(exactness):
    (group,) = rollout()
    more = group.samples[1].model_copy(update={"sample_index": 2})
    unasked = [group.model_copy(update={"samples": (*group.samples, more)})]
    for got, index, what in (([group, group], 0, "doubled"), (unasked, 2, "surplus")):
        result = compare([group], got, exactness=exactness)
        first = result["first_difference"]
        assert not (result["identical"] or result["holds"]) and (first["sample_index"], first["what"]) == (index, what)


def test_the_deliberate_corruption_is_found():
    groups = rollout()
    first = compare(groups, corrupt(groups))["first_difference"]
    assert (first["sample_index"], first["position"], first["what"]) == (1, 2, "token")


def done(groups, **changes) -> dict:
    return {
        "groups": groups,
        "seconds": 1.0,
        "note": None,
        "pulled_tokens": 0,
        "corrupt_blocks": 0,
        "races": 0,
    } | changes


def drafted(by: str = "group") -> list[GroupResult]:
    return rollout(drafted_tokens=3, accepted_tokens=2, drafted_by_source={by: 3})


def by_an_adapter() -> list[GroupResult]:
    whole = Segment(weights_version=0, adapter_digest="a", replica_id="r", start=0, end=4)
    return rollout(segments=(whole,))


def moved() -> list[GroupResult]:
    halves = [Segment(weights_version=0, replica_id=r, start=2 * i, end=2 * i + 2) for i, r in enumerate("ab")]
    return rollout(drafted_tokens=3, accepted_tokens=2, segments=tuple(halves))


def over_http(note="", moved=1) -> dict:
    """As of HTTP: samples without counts and raw logprobs; the counts are the journal's."""
    (group,) = rollout()
    bare = [sample.model_copy(update={"raw_logprobs": ()}) for sample in group.samples]
    return done(
        [group.model_copy(update={"samples": bare})],
        note=note,
        counts={"drafted_tokens": 3, "accepted_share": 0.5, "moved_samples": moved},
    )


@pytest.mark.parametrize(
    "name, short, lacks, whole",
    [
        ("chunks_of_64", done(rollout()), "drafted", done(drafted())),
        ("raced", done(drafted(), note="killed"), "raced", done(drafted(), note="killed", races=1)),
        ("raced", done(drafted(), races=1), "did not happen", done(drafted(), note="killed", races=1)),
        ("scaled_down", done(drafted(), note="2 became 1"), "no sample moved", done(moved(), note="2 became 1")),
        ("scaled_down", done(moved()), "did not happen", done(moved(), note="2 became 1")),
        ("driver_killed", done(drafted()), "did not happen", done(drafted(), note="killed")),
        ("driver_killed", done(drafted()), "did not happen", done(drafted(), note="killed")),
        (
            "kv_bits_flipped",
            done(moved(), note="flipped"),
            "no block was found corrupt",
            done(moved(), note="flipped", corrupt_blocks=1),
        ),
        ("replica_killed", done(drafted(), note="killed"), "pulled", done(drafted(), note="killed", pulled_tokens=9)),
        ("plain_adapters", done(rollout()), "no token was of an adapter", done(by_an_adapter())),
        ("over_http", over_http(), "did not happen", over_http(note="3 clients")),
        ("over_http", over_http(note="3 clients", moved=0), "no sample moved", over_http(note="3 clients")),
        ("trajectories", over_http(), "did not happen", over_http(note="killed a replica")),
        ("decoupled", done(drafted()), "draft model's", done(drafted("model"))),
        ("drafter_killed", done(drafted("model")), "did not happen", done(drafted("model"), note="killed")),
    ],
)
def test_a_run_that_has_not_shown_what_it_is_there_for_fails(name, short, lacks, whole):
    plain = {"plain": done(rollout())}
    failed = certificate(plain | {name: short})
    assert not failed["identical"] and lacks in failed["runs"][1]["first_difference"]["what"]
    assert certificate(plain | {name: whole})["identical"]


KILLS = ("kill_a_replica", "kill_the_coordinator", "kill_the_context", "kill_the_drafter")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_kill_that_finds_no_process_has_no_note(monkeypatch, killed):
    counts = iter(range(9))  # guesses of draft models, which grow
    replica = SimpleNamespace(replica_id="r", running=2)
    status = SimpleNamespace(replicas=[replica], running=2, batches=[])
    for module in (disturbances, trajectories):
        monkeypatch.setattr(module, "kill_actors", lambda *_, **__: killed)
    monkeypatch.setattr(disturbances, "_under_way", AsyncMock(return_value=status))
    monkeypatch.setattr(disturbances, "guesses", lambda _: next(counts))
    client = AsyncMock()
    client.status.return_value = status
    notes = [asyncio.run(getattr(disturbances, name)(client, "b")) for name in KILLS]
    notes += [asyncio.run(kill(client)) for kill in trajectories.KILLS]
    assert [bool(note) for note in notes] == [bool(killed)] * 7


@pytest.mark.parametrize(
    ("rows", "notes", "said"),
    [
        ([1], ["1 gateway"], "1 rows, 1 gateway"),
        ([1], ["1 gateway", ""], ""),
        ([], ["1 gateway"], "trajectories: 'p' index 0 has no rows"),
    ],
)
def test_trajectories_show_rows_and_every_kill(monkeypatch, rows, notes, said):
    played = SimpleNamespace(rows=rows, first=None, tokens=lambda: rows)
    monkeypatch.setattr(trajectories, "_played", AsyncMock(return_value=([played], notes)))
    monkeypatch.setattr(trajectories, "groups_of_answers", lambda _: {})
    batch = RolloutBatch(batch_id="b", groups=(PromptGroup(prompt_id="p", token_ids=(1,), samples=1),))
    try:
        assert asyncio.run(trajectories.trajectories(AsyncMock(), "http://127.0.0.1:1", batch)) == ([], said)
    except Failed as error:
        assert str(error) == said
    else:
        assert rows


def test_a_kill_that_finds_nobody_busy_is_not_waited_for(monkeypatch):
    """All turns have ended: the service has no running sample any more."""
    answer = SimpleNamespace(prompt_token_ids=(1,), sample=SimpleNamespace(token_ids=(2,)))
    trajectory = SimpleNamespace(rows=AsyncMock(return_value=SimpleNamespace(rows=(1,))), close=AsyncMock())
    monkeypatch.setattr(trajectories, "CapturedTrajectory", lambda *_: trajectory)
    monkeypatch.setattr(trajectories, "_turn", AsyncMock(return_value=answer))
    monkeypatch.setattr(trajectories, "kill_actors", lambda *_, **__: 1)
    group = PromptGroup(prompt_id="p", token_ids=(1,), samples=1)
    batch, client = RolloutBatch(batch_id="b", groups=(group,)), AsyncMock()
    client.status.return_value = SimpleNamespace(running=0)

    async def played():
        async with asyncio.timeout(10):
            return await trajectories._played(AsyncMock(), batch, [(group, 0)], client, trajectories.KILLS)

    assert asyncio.run(played())[1] == ["", "1 gateway", ""]


def test_raw_logprobs_may_be_absent_over_http_alone():
    with pytest.raises(ValueError, match="broadcast"):
        certificate({"plain": done(rollout()), "two_turns": over_http()})


def test_together_the_runs_pass_through_every_drafting_policy():
    assert {Policies(**run.policies).drafting.type for run in RUNS} == set(members("drafting"))


@pytest.mark.parametrize("name", ["serve.yaml", "serve.elastic.yaml", "serve.http.yaml"])
@pytest.mark.parametrize("kind", [TWO, DRAFTED, LORA, Service()])
def test_every_service_is_one_that_the_configuration_may_ask_for(name, kind, tmp_path):
    """Strict validation anew: what was copied together is a file that loads."""
    file = load_config(DEFAULT_CONFIG.with_name(name))
    file = file.model_copy(update={"applications": (file.application.with_args(drafter=DrafterConfig(model="small")),)})
    file = kind.of(with_engine(file, kind.engine_of(file)), tmp_path)
    application = ServeFile.model_validate(declared(file)).application
    drafters = application.args.drafter.replicas.max if application.args.drafter else 0
    assert application.args.replicas.max + drafters == 2 and bool(drafters) == kind.drafter
    assert application.args.replicas.come_and_go == kind.elastic
    assert (file.gateway is not None) == kind.gateway
    assert application.args.engine.vllm_args.get("enable_lora", False) == kind.adapters


def test_the_adapters_are_of_the_model_s_layers_and_differ(tmp_path):
    shapes = {"model.layers.0.self_attn.q_proj.weight": (6, 4), "model.layers.0.mlp.up_proj.weight": (8, 4)}
    others = {"model.embed_tokens.weight": (9, 4), "model.layers.0.self_attn.q_proj.bias": (6,)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in (shapes | others).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for seed in range(2):
        make_adapter(tmp_path, tmp_path / f"{seed}", seed)
        assert misfit(str(tmp_path / f"{seed}"), shapes) is None
        assert len(read_header(tmp_path / f"{seed}" / TENSORS)[0]) == 2 * len(shapes)
    assert adapter_digest(str(tmp_path / "0")) != adapter_digest(str(tmp_path / "1"))
    settings = json.loads((tmp_path / "0" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["q_proj", "up_proj"]


def test_at_law_a_token_that_parts_is_counted_and_nothing_else_is_excused():
    parted = rollout(token_ids=(10, 11, 99, 14), logprobs=(-1.0, -2.1, -3.0, -4.0))
    result = compare(rollout(), parted, exactness="law")
    assert (result["holds"], result["identical"], result["flips"], result["compared_tokens"]) == (True, False, 1, 7)
    assert result["first_difference"]["what"] == "token" and result["max_logprob_difference"] == pytest.approx(0.1)
    assert not compare(rollout(), parted)["holds"], "at bits it fails"
    for wrong in (
        {"token_ids": (10, 11, 12)},
        {"finish_reason": SampleEnd.LENGTH},
        {"logprobs": (-1.0, -2.0, float("nan"), -4.0)},
    ):
        assert not compare(rollout(), rollout(**wrong), exactness="law")["holds"]
    two = [parted[0].model_copy(update={"samples": (parted[0].samples[1],)})]
    missing = compare(rollout(), two, exactness="law")
    assert missing["first_difference"]["what"] == "missing" and missing["flips"] == 1 and not missing["holds"]


def test_the_certificate_at_law_has_flips_per_million_and_still_wants_what_a_run_is_for():
    parted = rollout(token_ids=(10, 11, 99, 14), drafted_tokens=3, accepted_tokens=2)
    rolled = {"plain": done(rollout()), "chunks_of_64": done(parted)}
    law = certificate(rolled, exactness="law")
    assert law["holds"] and not law["identical"]
    assert (law["flips"], law["compared_tokens"], law["flips_per_million"]) == (1, 7, pytest.approx(1e6 / 7))
    assert "1 samples part, of 7 tokens compared: 142857 flips per million" in sentences(law)[0]
    bits = certificate(rolled)
    assert not bits["holds"] and bits["flips"] == 1
    lacking = certificate({"plain": done(rollout()), "chunks_of_64": done(rollout())}, exactness="law")
    assert not lacking["holds"] and "drafted" in lacking["runs"][1]["first_difference"]["what"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--only", "update"), "there is none here"),
        (("--runs", "plain"), "there is none here"),
        (("--exactness", "law"), "does not fail"),
    ],
)
def test_a_corruption_that_no_check_could_find_is_refused(capsys, arguments, said):
    assert command(["verify", "--corrupt", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_the_last_run_that_is_compared_is_corrupted():
    adapted = next(run.name for run in RUNS if run.adapted)  # the reference of runs with adapters
    runs = _chosen(("moved", adapted), load_config(DEFAULT_CONFIG).application.args.engine)
    assert runs[-1].name == adapted and _to_corrupt(runs, None, "bits") == "moved"


def test_redraws_are_no_run_at_law():
    file = load_config(DEFAULT_CONFIG)
    engine = _at_level(file, "law", "bfloat16").application.args.engine
    assert {run.name for run in RUNS} - {run.name for run in _chosen((), engine)} == {"redrawn"}
    assert _chosen((), file.application.args.engine) == list(RUNS)
    with pytest.raises(BadInput, match="--runs redrawn: redraws need exactness bits"):
        _chosen(("redrawn",), engine)
    assert (engine.exactness, engine.dtype) == ("law", "bfloat16") and _at_level(file, None, None) is file
    with pytest.raises(BadInput, match="exactness: in float16 a CPU's tokens depend on the batch; write law"):
        _at_level(file, None, "float16")
    with pytest.raises(BadInput, match="redraw_close_calls: at exactness law"):
        _at_level(with_engine(file, {"redraw_close_calls": True}), "law", None)


def test_adapters_are_no_run_of_windows():
    windowed = _at_level(load_config(DEFAULT_CONFIG), "bits", "bfloat16").application.args.engine
    left_out = {run.name for run in RUNS} - {run.name for run in _chosen((), windowed)}
    assert left_out == {run.name for run in RUNS if run.adapted}
    with pytest.raises(BadInput, match="--runs moved_adapters: bits in bfloat16 on a CPU takes no adapters"):
        _chosen(("moved_adapters",), windowed)


def test_a_run_on_a_service_without_http_asks_for_no_address(monkeypatch):
    for name, found in {"whole": None, "pool_counts": Counter(), "work_of": Counter(), "groups_of": ["groups"]}.items():
        monkeypatch.setattr(tokens, name, AsyncMock(return_value=found))
    monkeypatch.setattr(tokens, "REPORTED_S", 0)
    monkeypatch.setattr(tokens, "total", dict)
    file = load_config()
    assert file.gateway is None
    (run,) = (run for run in RUNS if run.name == "ngram_drafts")
    group = PromptGroup(prompt_id="p", token_ids=(1, 2))
    batch = RolloutBatch(batch_id="b", groups=(group,))
    assert asyncio.run(tokens.roll(AsyncMock(), run, batch, file))["groups"] == ["groups"]


def test_a_step_is_frozen_in_an_engine_of_this_process_alone():
    """Another service of the machine has engines, too."""
    engine = ["ray::ServeReplica:tailrace:Engine.step", "-c", "import time; time.sleep(600)"]
    program = "import subprocess, sys; none = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}; "
    program += f"print(subprocess.Popen({engine}, executable=sys.executable, **none).pid)"
    by_another = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    with subprocess.Popen(engine, executable=sys.executable) as ours:
        try:
            deadline_s = time.monotonic() + 30
            while not (found := processes_titled("Engine")) and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert found == [ours.pid]
        finally:
            ours.kill()
            os.kill(int(by_another.stdout), signal.SIGKILL)


def test_a_thread_that_ends_between_the_listing_and_the_read_is_left_out(monkeypatch):
    listed = frozen_thread.Path.iterdir
    monkeypatch.setattr(frozen_thread, "SAMPLE_S", 0.0)
    monkeypatch.setattr(frozen_thread.Path, "iterdir", lambda folder: [folder / "0", *listed(folder)])
    pid, thread, _ = busiest_thread(os.getpid())
    assert pid == os.getpid() and thread != 0


KILLED_DRIVER = "killed a driver with 2 samples running"


@pytest.mark.parametrize(("program", "note"), [("sys.exit(1)", ""), ("time.sleep(600)", KILLED_DRIVER)])
def test_another_driver_that_ends_by_itself_was_not_killed(monkeypatch, program, note):
    async def under_way(*_):
        await asyncio.sleep(3600 if "exit" in program else 0.2)
        return SimpleNamespace(running=2)

    context = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setitem(sys.modules, "ray", context)
    monkeypatch.setattr(disturbances, "DRIVER", f"import sys, time; {program}")
    monkeypatch.setattr(disturbances, "_under_way", under_way)
    batch = RolloutBatch(batch_id="b", groups=(PromptGroup(prompt_id="p", token_ids=(1,)),))

    async def killed():
        async with asyncio.timeout(60):
            return await disturbances.kill_another_driver(AsyncMock(), batch)

    assert asyncio.run(killed()) == note


def test_a_replica_that_never_gets_the_new_weights_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(finished, "DEPLOY_S", 0.2)
    monkeypatch.setattr(finished, "_roll", AsyncMock(return_value=[]))
    client, batch = AsyncMock(), RolloutBatch(batch_id="b", groups=(PromptGroup(prompt_id="p", token_ids=(1,)),))
    client.status.return_value = SimpleNamespace(
        weights_version=0, batches=[], replicas=[SimpleNamespace(weights_version=0)]
    )

    async def rolled():
        async with asyncio.timeout(60):
            await finished.rolled(client, batch, "weights")

    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(rolled())
    assert time.monotonic() < began_s + 30


def test_a_driver_without_a_group_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(restarted_head, "DRIVER_S", 1.0)
    batch = RolloutBatch(batch_id="b", groups=(PromptGroup(prompt_id="p", token_ids=(1,)),))
    driver = restarted_head.Driver(batch, tmp_path, "127.0.0.1:1")
    driver._command = (sys.executable, "-c", "import time; time.sleep(60)")
    with pytest.raises(Failed, match="no group after 1 s"):
        driver.killed_with(SimpleNamespace(kill=None))


@pytest.mark.parametrize(("program", "said"), [("time.sleep(600)", "not ended after 2 s"), ("sys.exit('no')", "no")])
def test_a_driver_over_a_restarted_head_that_does_not_end_well_is_ended(monkeypatch, tmp_path, program, said):
    started: list[subprocess.Popen] = []
    monkeypatch.setattr(restarted_head, "DRIVER_S", 2.0)
    batch = RolloutBatch(batch_id="b", groups=(PromptGroup(prompt_id="p", token_ids=(1,)),))
    driver = restarted_head.Driver(batch, tmp_path, "127.0.0.1:1")
    driver._command, start = (sys.executable, "-c", f"import sys, time; {program}"), driver._start
    driver._start = lambda: started.append(start()) or started[-1]
    with pytest.raises(Failed, match=said):
        driver.finish()
    assert [one.poll() is None for one in started] == [False]


# ---- over an update of the weights ---------------------------------------------------------------------


def under(*versions: int, **changes) -> list[GroupResult]:
    """A sample whose tokens are of these weights versions, two tokens each."""
    parts = [
        Segment(weights_version=version, replica_id="r", start=2 * place, end=2 * place + 2)
        for place, version in enumerate(versions)
    ]
    (group,) = rollout()
    sample = group.samples[0].model_copy(update={"segments": tuple(parts)} | changes)
    return [group.model_copy(update={"samples": (sample,)})]


def span(number: int, version: int) -> dict:
    counts = {"tailrace.kv.cached_tokens": 0, "tailrace.kv.pulled_tokens": 0, "tailrace.chunk.new_tokens": 2}
    return {"attributes": counts | {"tailrace.chunk.id": f"p#0:{number}", "tailrace.weights.version": version}}


def test_a_sample_that_crossed_an_update_is_checked_or_the_certificate_fails():
    crossed, spans = under(0, 1), [span(0, 0), span(1, 1)]
    fresh = [crossed[0].model_copy(update={"samples": rollout(token_ids=(12, 13))[0].samples[1:]})]
    whole = weights_update.certificate(crossed, fresh, spans)
    assert whole["identical"] and (whole["samples"], whole["unchecked"]) == (1, 0)
    untraced = weights_update.certificate(crossed, fresh, spans[:1])
    assert not untraced["identical"] and untraced["unchecked"] == 1, "nobody saw whether it read old KV"
    other = [group.model_copy(update={"prompt_id": "q"}) for group in crossed]
    lost = weights_update.certificate([*crossed, *other], fresh, [*spans, *spans])
    assert not lost["identical"] and lost["unchecked"] == 1


def test_without_a_sample_that_crossed_the_update_no_second_service_starts(monkeypatch, tmp_path):
    crossing = AsyncMock(return_value=(under(0), []))
    monkeypatch.setattr(weights_update, "_cross", crossing)
    monkeypatch.setattr(weights_update, "service", lambda *_: nullcontext())
    batch = RolloutBatch(batch_id="b", groups=(PromptGroup(prompt_id="p", token_ids=(1,)),))
    found = weights_update.measure(load_config(), batch, tmp_path, "fresh", lambda _: None)
    assert (found["identical"], found["samples"]) == (False, 0)


def test_an_update_that_is_refused_under_way_says_why():
    client = AsyncMock()
    client.status.return_value = SimpleNamespace(batches=[SimpleNamespace(batch_id="b", tokens=99)])
    client.update_weights.side_effect = ValueError("refused: no such folder")

    async def groups(_):
        await asyncio.sleep(0.2)
        yield under(0)[0]

    client.rollout = groups
    batch = RolloutBatch(batch_id="b", groups=(PromptGroup(prompt_id="p", token_ids=(1,), max_tokens=4),))
    with pytest.raises(ValueError, match="refused: no such folder"):
        asyncio.run(weights_update._cross(client, batch, Policies(), DEFAULT_CONFIG))


@pytest.mark.parametrize("missing", ["before", "across", "right_after", "after"])
def test_a_sample_that_one_run_of_finish_lacks_fails_the_certificate(missing):
    new = under(1, token_ids=(20, 21))
    rolls = finished.FinishedRolls(under(0), under(0), new, new, in_flight=1)
    assert finished.certificate(rolls)["identical"]
    lacking = finished.certificate(rolls._replace(**{missing: []}))
    assert not lacking["identical"] and lacking["unchecked"] == 1


@pytest.mark.parametrize("exactness", ["bits", "law"])
def test_a_load_that_changes_the_version_alone_fails_the_command(monkeypatch, capsys, exactness):
    rolls = finished.FinishedRolls(under(0), under(0), under(1), under(1), in_flight=1)
    found = finished.certificate(rolls)
    assert not found["identical"] and (found["changed"], found["flips"], found["mixed"]) == (0, 0, 0)
    monkeypatch.setattr(verify, "_update", lambda *_: found)
    assert command(["verify", "--only", "update", "--kv-on-update", "finish", "--exactness", exactness]) == 1
    assert "no sample has other tokens under the new weights" in capsys.readouterr().err


@pytest.mark.parametrize("exactness", ["bits", "law"])
def test_an_update_with_unchecked_samples_fails_the_command(monkeypatch, capsys, exactness):
    update = {"identical": False, "samples": 3, "old_kv_hit_tokens": 0, "unchecked": 2, "first_difference": None}
    monkeypatch.setattr(verify, "_update", lambda *_: dict(update))
    assert command(["verify", "--only", "update", "--exactness", exactness]) == 1
    assert "2 samples of the update could not be checked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"), [(None, None), (ProcessLookupError("it is gone"), "its disturbance failed: it is gone")]
)
def test_a_disturbance_of_the_pool_that_fails_fails_its_run(monkeypatch, error, said):
    """A pull that comes late on a busy machine is a sign of a lost store, too."""
    store = {"pid": 1, "segment": "s", "ssd": "off"}
    page = {"store_nodes": [store], "master_pid": 2, "dram_capacity_bytes": 1, "keys": 1}
    counts = iter([{}, {"pull_failed.late": 1}])
    views = (SimpleNamespace(status=page, counts=count) for count in counts)
    monkeypatch.setattr(chaos, "_whole", AsyncMock(side_effect=views))
    monkeypatch.setattr(chaos, "REPORTED_S", 0)
    monkeypatch.setattr(chaos.Disturbance, "act", AsyncMock(side_effect=error, return_value="kill 1"))
    client, (group,) = AsyncMock(), rollout()

    async def groups(_):
        await asyncio.sleep(0)
        yield group

    client.rollout = groups
    batch = RolloutBatch(batch_id="b", groups=(PromptGroup(prompt_id="p", token_ids=(1,), samples=2),))
    killed = next(one for one in chaos.DISTURBANCES if one.name == "store_killed")
    found, result = asyncio.run(chaos._roll(client, killed, batch, [group]))
    assert chaos.wrong(killed, result | compare([group], found), batch, PoolConfig()) == said


# ---- what a rollout leaves in the pool -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, None),
        ({"keys": 2}, "left over: 2 keys"),
        ({"keys_meanwhile": 0}, None),
        ({"keys_meanwhile": 0, "pool_tokens": 0}, "the pool held no key during the rollout"),
    ],
)
def test_a_pool_that_held_nothing_shows_nothing(monkeypatch, capsys, found, said):
    empty = {"keys": 0, "bytes": 0, "processes": 0, "keys_meanwhile": 40, "pool_tokens": 96}
    monkeypatch.setattr(leftovers, "measure", lambda *_: empty | found)
    assert command(["pool", "verify", "--json"]) == (0 if said is None else 1)
    assert (said or "") in capsys.readouterr().err
