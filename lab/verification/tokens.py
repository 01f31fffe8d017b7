"""The same-tokens certificate: one workload, rolled out in every way that must not matter, compared token by token.

Law 2: a sample's tokens are a function of weights, prompt, sampling parameters and sample key, and of nothing else.
Logprobs, sampling and raw, may differ by floating-point noise (TOLERANCE). At exactness `law` a token may differ, too:
that is a flip, which is counted, and tokens after it are not compared. All else fails at both levels: a sample that is
missing, that came twice or that nobody asked for, another end after the same tokens, a logprob that is no number.
Called by `tailrace verify`.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import DEPLOY_S, service
from tailrace.app.config import ServeFile, with_engine
from tailrace.app.progress import RolloutProgress
from tailrace.app.summary import summarise
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch, SampleResult
from tailrace.lab.verification.adapters import adapted, adapters_of
from tailrace.lab.verification.closeness import (
    close_calls_of,
    flips,
    noise_of,
    redraws_of,
    sureness,
    total,
    work_of,
)
from tailrace.lab.verification.journaled import Journaled
from tailrace.lab.verification.over_http import over_http
from tailrace.lab.verification.restarted_head import roll_over_restart
from tailrace.lab.verification.ruled import ruled
from tailrace.lab.verification.runs import RUNS, SHOWN, VerificationRun
from tailrace.lab.verification.trajectories import trajectories
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.exactness import Exactness

TOLERANCE = 1e-4

REPORTED_S = 1.5
"""Seconds after which the coordinator has heard of everything that its replicas counted before: three polls."""


async def roll(client: RolloutClient, run: VerificationRun, batch: RolloutBatch, file: ServeFile) -> dict:
    """Rolls out the workload once on all replicas of this service. Returns its groups, the note, tokens pulled, and
    counts by the journal.
    """
    if run.adapted:
        async with adapters_of(client):
            return await _roll(client, run, adapted(batch), file)
    return await _roll(client, run, ruled(batch) if run.ruled else batch, file)


def _url(file: ServeFile) -> str:
    """Returns the address of the gateway of a service that has one."""
    return f"http://{file.gateway.args.host}:{file.gateway.args.port}"


async def _roll(client: RolloutClient, run: VerificationRun, batch: RolloutBatch, file: ServeFile) -> dict:
    journaled = "races" in run.shows or run.clients
    if journaled:
        await client.journal(True)
    await client.set_policies(Policies(**run.policies))
    await whole(client, file.application.args.replicas.max)
    await client.forget_history()
    if run.after_an_epoch:
        earlier = {"batch_id": f"verify-{run.name}-before", "seed": batch.seed + 1}  # other keys, other answers
        await groups_of(client, batch.model_copy(update=earlier))
    await client.reset_caches()
    before, work = await pool_counts(client), await work_of(client)
    batch = batch.model_copy(update={"batch_id": f"verify-{run.name}"})
    began_s = time.monotonic()
    note = await run.begin(client, batch) if run.begin else None
    disturbed = asyncio.create_task(run.disturb(client, batch.batch_id)) if run.disturb else None
    if run.clients:
        groups, note = await over_http(_url(file), run.clients, batch)
    elif run.trajectories:
        groups, note = await trajectories(client, _url(file), batch)
    else:
        groups = await (run.ask or groups_of)(client, batch)
    seconds = round(time.monotonic() - began_s, 1)
    await asyncio.sleep(REPORTED_S)
    if disturbed:
        note = disturbed.result() if disturbed.done() else None
        disturbed.cancel()
    counts, work = await pool_counts(client) - before, await work_of(client) - work
    journal = Journaled(await client.journal(False)) if journaled else None
    return {
        "groups": groups,
        "seconds": seconds,
        "note": note,
        "pulled_tokens": counts["pool_tokens"],
        "corrupt_blocks": counts["load_failed.corrupt"],
        "races": journal.races if journal else 0,
        "work": total(work),
        "counts": journal.counts() if run.clients else {},
    }


async def whole(client: RolloutClient, replicas: int) -> None:
    """Waits until this many replicas take chunks: one may have been killed, or given back."""
    async with asyncio.timeout(DEPLOY_S):
        while sum(one.ready and not one.closing for one in (await client.status()).replicas) < replicas:
            await client.reserve(replicas)
            await asyncio.sleep(0.5)


async def groups_of(client: RolloutClient, batch: RolloutBatch) -> list[GroupResult]:
    """Returns the results of a batch; shows its progress."""
    progress = RolloutProgress(client, batch.batch_id, sum(group.samples for group in batch.groups))
    following = asyncio.create_task(progress.follow())
    try:
        return [group async for group in client.rollout(batch)]
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def pool_counts(client: RolloutClient) -> Counter[str]:
    """Returns the counts of the pool's use so far, over all replicas; none without a pool."""
    pool = (await client.status()).pool
    return Counter() if pool is None else Counter(pool.counts)


def roll_all(
    file: ServeFile, batch: RolloutBatch, runs: Sequence[VerificationRun], say: Callable[[str], None]
) -> dict[str, dict]:
    """Returns every run's groups and note by run name. Services are started and stopped as the runs need them."""
    rolled: dict[str, dict] = {}
    with TemporaryDirectory(prefix="tailrace-drafter-") as folder:
        left = list(runs)
        while left:
            kind = left[0].service
            wanted = kind.of(with_engine(file, kind.engine_of(file)), Path(folder))
            ours, left = [run for run in left if run.service == kind], [run for run in left if run.service != kind]
            say(f"starting a service for {', '.join(run.name for run in ours)}")
            with contextlib.nullcontext() if kind.restarted else service(wanted, None) as client:
                for run in ours:
                    began_s = time.monotonic()
                    if kind.restarted:
                        done = roll_over_restart(wanted, run.policies, batch)
                    else:
                        done = asyncio.run(roll(client, run, batch, wanted))
                    rolled[run.name] = done
                    say(f"{len(rolled)}/{len(runs)} {run.name}: {line(done)}; {time.monotonic() - began_s:.0f} s")
    return rolled


def line(done: dict) -> str:
    note = f", {done['note']}" if done["note"] else ""
    return f"{summarise(done['groups']).get('tokens', 0)} tokens, {done['pulled_tokens']} pulled{note}"


def corrupt(groups: list[GroupResult]) -> list[GroupResult]:
    """Replaces one token of one sample, which the certificate must find."""
    group = groups[0]
    sample = group.samples[-1]
    position = len(sample.token_ids) // 2
    tokens = (*sample.token_ids[:position], sample.token_ids[position] ^ 1, *sample.token_ids[position + 1 :])
    wrong = group.model_copy(update={"samples": (*group.samples[:-1], sample.model_copy(update={"token_ids": tokens}))})
    return [wrong, *groups[1:]]


LOGPROBS = ("logprobs", "raw_logprobs")


def compare(
    expected: list[GroupResult],
    got: list[GroupResult],
    kinds: tuple[str, ...] = LOGPROBS,
    exactness: Exactness = "bits",
) -> dict:
    """Returns whether two rollouts are the same; `first_difference` names prompt, sample and position. `holds` says
    whether they differ by no more than the level allows; if they do, it is the first such difference that is named.

    The logprob differences are over all tokens that agree, of these kinds: the floating-point noise seen.
    `compared_tokens`: tokens up to each sample's first difference; `flips`: samples whose tokens part.
    """
    theirs = {(group.prompt_id, sample.sample_index): sample for group in got for sample in group.samples}
    found, noise, compared, tolerance = [], [np.zeros(1)], 0, TOLERANCE if exactness == "bits" else np.inf
    for group in sorted(expected, key=lambda g: g.prompt_id):
        for sample in group.samples:
            one, gaps = difference(sample, theirs.get((group.prompt_id, sample.sample_index)), kinds, tolerance)
            noise.append(gaps)
            compared += one["position"] + 1 if one and one["what"] == "token" else len(gaps) // len(kinds)
            found += [{"prompt_id": group.prompt_id, "sample_index": sample.sample_index, **one}] if one else []
    found += surplus(expected, got)
    seen, flips = np.concatenate(noise), [one for one in found if one["what"] == "token"]
    breaks = found if exactness == "bits" else [one for one in found if one not in flips]
    return {
        "identical": not found,
        "holds": not breaks,
        "first_difference": next(iter(breaks or found), None),
        "flips": len(flips),
        "compared_tokens": compared,
        "max_logprob_difference": float(seen.max()),
        "mean_logprob_difference": float(seen.mean()),
    }


def surplus(expected: list[GroupResult], got: list[GroupResult]) -> list[dict]:
    """Returns a difference for each sample that came more than once, or that is not among the expected ones."""
    wanted, came = (
        Counter((group.prompt_id, sample.sample_index) for group in groups for sample in group.samples)
        for groups in (expected, got)
    )
    more = [place for place, count in sorted(came.items()) if count > 1 or not wanted[place]]
    kinds = ["doubled" if wanted[place] else "surplus" for place in more]
    return [
        {"prompt_id": name, "sample_index": index, "position": 0, "what": kind}
        for (name, index), kind in zip(more, kinds, strict=True)
    ]


def difference(
    a: SampleResult, b: SampleResult | None, kinds: tuple[str, ...] = LOGPROBS, tolerance: float = TOLERANCE
) -> tuple[dict | None, np.ndarray]:
    """Returns the first difference, and the logprob differences of the tokens before it. `tolerance`: of logprobs."""
    if b is None:
        return {"position": 0, "what": "missing"}, np.zeros(0)
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    common = min(len(a.token_ids), len(b.token_ids))
    end = next((position for position, (x, y) in enumerate(pairs) if x != y), common)
    gaps = {kind: np.abs(np.subtract(getattr(a, kind)[:end], getattr(b, kind)[:end])) for kind in kinds}
    for what, gap in gaps.items():
        for position in np.flatnonzero(~(gap <= tolerance)):
            return {"position": int(position), "what": what, "gap": float(gap[position])}, np.zeros(0)
    noise = np.concatenate(list(gaps.values()))
    if end < common:
        return {"position": end, "what": "token", "expected": a.token_ids[end], "got": b.token_ids[end]}, noise
    ends = [(len(sample.token_ids), str(sample.finish_reason)) for sample in (a, b)]
    if ends[0] != ends[1]:
        return {"position": end, "what": "end", "expected": ends[0], "got": ends[1]}, noise
    return None, noise


def certificate(rolled: dict[str, dict], tolerance: float = 0.0, exactness: Exactness = "bits") -> dict:
    """Compares every run with the first one of its kind: with rules for tokens, with adapters, or without both.

    A run without its purpose shown fails like one that differs.
    `tolerance`: of the engines' close calls.
    """
    runs = [run for run in RUNS if run.name in rolled]
    references = {run.kind: rolled[run.name]["groups"] for run in reversed(runs)}
    rows = []
    for run in runs:
        kinds = LOGPROBS[:1] if run.over_http else LOGPROBS
        same = compare(references[run.kind], rolled[run.name]["groups"], kinds, exactness)
        figures = figures_of(rolled[run.name])
        lacks = next(
            (key for key in (*run.shows, *["note"] * bool(run.disturb or run.begin)) if not figures[key]), None
        )
        if lacks and same["holds"]:
            first = {"prompt_id": "", "sample_index": 0, "position": 0, "what": SHOWN[lacks]}
            same |= {"identical": False, "holds": False, "first_difference": first}
        rows.append({"name": run.name, "drafting": Policies(**run.policies).drafting.type, **same, **figures})
    every = [rolled[run.name]["groups"] for run in runs]
    expected = [references[run.kind] for run in runs]
    sure = sureness(every, map(work_in, rolled.values()), tolerance, expected)
    for reference, row, groups in zip(expected, rows, every, strict=True):
        row.update(flips(sure["draws_per_logit"], noise_of(reference, groups), tolerance))
    return {
        "exactness": exactness,
        "identical": all(row["identical"] for row in rows),
        "holds": all(row["holds"] for row in rows),
        **counted_flips([row for row, of, groups in zip(rows, expected, every, strict=True) if of is not groups]),
        "tokens": rows[0]["tokens"],
        "samples": rows[0]["samples"],
        "runs": rows,
        **sure,
    }


def counted_flips(rows: list[dict]) -> dict:
    """Returns the flips of some comparisons together, also per million compared tokens."""
    flipped, compared = (sum(row[key] for row in rows) for key in ("flips", "compared_tokens"))
    return {"flips": flipped, "compared_tokens": compared, "flips_per_million": 1e6 * flipped / max(1, compared)}


def work_in(done: dict) -> Counter[str]:
    """Returns the counts of a run's engines; none of a run that had no client here."""
    return done.get("work", Counter())


def figures_of(done: dict) -> dict:
    """Returns the report of a run."""
    summary = summarise(done["groups"])
    kept = ("samples", "tokens", "chunked_share", "moved_samples", "drafted_tokens", "accepted_share")
    samples = [sample for group in done["groups"] for sample in group.samples]
    segments = [segment for sample in samples for segment in sample.segments]
    more = {
        "model_tokens": sum(sample.drafted_by_source.get("model", 0) for sample in samples),
        "adapted_tokens": sum(one.end - one.start for one in segments if one.adapter_digest),
    }
    of_run = {key: done[key] for key in ("seconds", "pulled_tokens", "corrupt_blocks", "races", "note")}
    of_run |= {"close_calls": close_calls_of(done["groups"]), **redraws_of(work_in(done))}
    return {key: summary.get(key, 0) for key in kept} | more | done.get("counts", {}) | of_run
