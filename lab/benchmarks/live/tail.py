"""Tail policies on real replicas, against static groups and samples sent whole to the replica with fewest in flight.

The latter baseline also runs with Tailrace's drafts, and both baselines with vLLM's suffix drafts. All runs replay the
same tokens. Runs of one service take turns, each with all replicas up and all caches reset. Orderings that draw at
random have one seed in all runs of a turn, and another in the next, since it is luck when the longest sample starts.
The earlier checkpoint is history for drafts: Tailrace reads it from disk, for vLLM's suffix cache it is rolled out
first. Replica-seconds count replicas that are up, from submission to the last sample. Called by `tailrace bench tail`.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile, with_engine
from tailrace.app.files.history_import import HistoryImport
from tailrace.app.summary import summarise
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.context.archive import Archive
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.prompt_files import EVERY
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.messages.status import ReplicasChanged
from tailrace.lab.benchmarks.drafting.ladder import USUAL as ACCEPTED
from tailrace.lab.benchmarks.live.calibrate import workload
from tailrace.lab.benchmarks.live.medians import middle
from tailrace.lab.benchmarks.live.probes import Probes, engines, pooled
from tailrace.lab.benchmarks.live.tail_simulated import least, quickest, simulated
from tailrace.lab.simulator.bounds import reachable_s
from tailrace.lab.simulator.report import CLAIRVOYANT
from tailrace.lab.simulator.types import Cluster
from tailrace.lab.verification.runs import GROUP, WHOLE, of_vllm
from tailrace.lab.verification.services import Engine, Service
from tailrace.lab.verification.tokens import whole
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.lanes import ClairvoyantLanes
from tailrace.policies.families.racing import USUAL, MethodProfile
from tailrace.policies.families.registry import Policies

BATCH = "bench-tail"
SUFFIX: Engine = of_vllm(method="suffix", num_speculative_tokens=16)
STATIC = WHOLE | {"drafting": "off", "lanes": "none"}
ROUTED = STATIC | {"ordering": "fcfs", "placement": "round_robin"}
"""Policies of the run `routed`, as in today's trainers (verl's agent loop, prime-rl). Each sample goes to the replica
with fewest in flight: the next one in turn while all samples are sent at once, later the one where a sample ended.
"""

GROUPED = "routed_group"
"""Name of the run like `routed` with the configured drafts. Others gain over this run by chunks and moves alone."""

RACE = {"type": "fastest_of_n"}
RUNGS = (*USUAL, *(MethodProfile(name, USUAL[0].curve, (ACCEPTED[name],)) for name in ("history", "ngram")))
"""Draft methods of the run `race`: the usual ones, and parts of the index for services without a draft model."""

TAILS: dict[str, dict] = {
    "hold": {"tail": "hold"},
    "release": {"tail": "release"},
    "consolidate": {"tail": "consolidate"},
    "draft": {"tail": "draft"},
    "race": {"tail": "hold", "racing": RACE | {"rungs": RUNGS}},
    "auto": {"tail": "auto", "racing": RACE},
}
"""Policies for freed replicas, by run; all others are as configured. `draft` needs draft models for free places. `auto`
races only if there is a draft model, since parts of the index are not expected to gain over the whole index.
"""

LANES = {"lanes": {"type": "auto"}, "lengths": {"type": "belief"}}
"""Policies that the run `lanes` has besides those of `auto`. Other runs have no lanes."""

ALL = {"drafting": {"type": "fixed", "tokens": 16}}  # all tokens that vLLM's drafter proposes
WITH_SUFFIX = {"static_suffix": STATIC | ALL, "routed_suffix": ROUTED | ALL}
"""Policies of the runs with vLLM's suffix drafts, each on a separate service."""

NAMES = ("static", "routed", GROUPED, "seer", *TAILS, "lanes", *WITH_SUFFIX)
"""Names of all runs."""

SETTLED_S = 5.0
"""Seconds after which Serve has stopped the replicas that it was told to stop."""

KEPT = (
    "makespan_s", "tail_s", "drain_s", "mean_sample_s", "tokens", "moved_samples", "drafted_tokens", "accepted_share",
)  # fmt: skip


@dataclass(frozen=True)
class Replay:
    """A replayed workload. `groups`: groups to roll out. `earlier`: the same prompts with the answers of the checkpoint
    before. `lines`: the texts of `earlier`, as lines of a trace.
    """

    groups: Sequence[PromptGroup]
    earlier: Sequence[PromptGroup]
    lines: Sequence[Mapping]
    prompts: Prompts

    @property
    def step(self) -> int:
        """Policy step of the rollout: the one after the last step in history."""
        return 1 + max(epoch["policy_step"] for line in self.lines for epoch in line["epochs"])

    def remember(self, history_dir: Path) -> None:
        """Writes the earlier checkpoint to disk, as an epoch of history."""
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.lines)
            file.flush()
            archive = Archive(ContextConfig(history_dir=str(history_dir)), EVERY)
            HistoryImport(archive, self.prompts, None, 0).add(Path(file.name), lambda _: None)


def measure(
    file: ServeFile, replay: Replay, chunk_tokens: int, repeats: int, say: Callable[[str], None],
    names: Sequence[str] = NAMES,
) -> dict:  # fmt: skip
    """Returns `runs` by name, those of `names`: medians of the repeats, with all makespans. Ratios are of makespans:
    above 1 the run is faster. There are no ratios to a baseline that is not in `names`.

    `simulated`: the runs in the simulator, without noise; empty if draft models are configured. `clairvoyant` is among
    them, lanes by true lengths: what scheduling can reach with that knowledge. `evened_s`: see `evened`.
    `bound_share`: the simulator's lower bound over the run's makespan, at the quickest steps that probes measured and
    at the run's acceptance. `reachable_share`: the same for work + longest, which needs no knowledge of lengths.
    """
    replicas = file.application.args.replicas.max
    with tempfile.TemporaryDirectory(prefix="tailrace-history-") as folder:
        say(f"starting {replicas} replicas")
        with service(_with(file, GROUP, Path(folder)), None) as client:
            policies = {name: what for name, what in named(file, chunk_tokens).items() if name in names}
            runs, probes = asyncio.run(_ours(client, policies, replay, replicas, repeats, Path(folder), say))
        for name in (one for one in WITH_SUFFIX if one in names):
            say(f"starting {replicas} replicas that draft by vLLM's suffix")
            with service(_with(Service().of(file, Path(folder)), SUFFIX, None), None) as client:
                runs[name] = asyncio.run(_suffix(client, name, replay, replicas, say))
    cluster = Cluster(quickest(probes), replicas, replicas)
    work = workload(replay.groups).steps[0]
    found = {name: least(run["accepted_share"], work, cluster) for name, run in runs.items()}
    bound_s = {name: one["best_s"] for name, one in found.items()}
    reach_s = {name: reachable_s(one) for name, one in found.items()}
    knowing = {CLAIRVOYANT: named(file, chunk_tokens)["lanes"].model_copy(update={"lanes": ClairvoyantLanes()})}
    replayed = {} if file.application.args.drafter else policies | knowing  # a replay has no draft models
    draws = {name: partial(drawn, of_run) for name, of_run in replayed.items()}
    may_be = file.application.args.replicas
    limits, models = Limits(may_be.min, may_be.max), probes.models(pooled(probes.ladders))
    return {
        "runs": runs,
        "ratio_to_static": ratios(runs, "static"),
        "ratio_to_routed": ratios(runs, "routed"),
        "ratio_to_routed_group": ratios(runs, GROUPED),
        "ratio_to_suffix": ratios(runs, "static_suffix"),
        "ratio_to_routed_suffix": ratios(runs, "routed_suffix"),
        "simulated": simulated(replay.groups, replay.earlier, models, limits, draws, say),
        "evened_s": evened({name: run for name, run in runs.items() if name in TAILS}),
        "bound_s": {name: round(seconds, 3) for name, seconds in bound_s.items()},
        "bound_share": {name: round(bound_s[name] / run["makespan_s"], 4) for name, run in runs.items()},
        "reachable_s": {name: round(seconds, 3) for name, seconds in reach_s.items()},
        "reachable_share": {name: round(reach_s[name] / run["makespan_s"], 4) for name, run in runs.items()},
    }


def named(file: ServeFile, chunk_tokens: int) -> dict[str, Policies]:
    """Returns the policies by run: the two baselines, the second also with the configured drafts, Seer's ordering in
    chunks without drafts, and the configured policies with each entry of TAILS, and with lanes.

    Leaves out `draft` unless the configuration has draft models that come and go.
    """
    configured = file.application.policies.model_dump() | {"lanes": "none"}
    configured["chunking"] |= {"chunk_tokens": chunk_tokens}
    seer = configured | {"ordering": "seer", "drafting": "off", "tail": "hold"}
    found = {"static": Policies(**STATIC), "routed": Policies(**ROUTED)}
    drafting = {key: configured[key] for key in ("drafting", "lengths")}  # which samples are late in their step
    found |= {GROUPED: Policies(**(ROUTED | drafting)), "seer": Policies(**seer)}
    found |= {name: Policies(**(configured | choice)) for name, choice in TAILS.items()}
    found["lanes"] = Policies(**(configured | TAILS["auto"] | LANES))
    drafter = file.application.args.drafter
    if drafter is None or not drafter.replicas.come_and_go:
        del found["draft"]
    return found


def rotated(names: Sequence[str], turn: int, turns: int) -> tuple[str, ...]:
    """Returns the names, with another one first in each turn: a machine that slows down then favours none."""
    first = turn * len(names) // turns
    return (*names[first:], *names[:first])


def drawn(policies: Policies, turn: int) -> Policies:
    """Returns the policies of a turn: an ordering that draws at random gets the seed of the turn."""
    ordering = policies.ordering
    if not hasattr(ordering, "seed"):
        return policies
    return policies.model_copy(update={"ordering": ordering.model_copy(update={"seed": ordering.seed + turn})})


def occupied_s(changes: Sequence[ReplicasChanged], began_s: float, ended_s: float) -> float:
    """Returns the replica-seconds between two unix times. `changes`: by arrival; no replica is up before the first."""
    total, up, since_s = 0.0, 0, began_s
    for change in changes:
        at_s = min(max(change.at_s, began_s), ended_s)
        total, up, since_s = total + up * (at_s - since_s), change.replicas, at_s
    return total + up * (ended_s - since_s)


def ratios(runs: Mapping[str, Mapping], to: str) -> dict[str, float]:
    """Returns the makespan of the run `to` over that of each run, or nothing if there was no run `to`."""
    if to not in runs:
        return {}
    return {name: round(runs[to]["makespan_s"] / run["makespan_s"], 3) for name, run in runs.items()}


def drain_s(ends_s: Sequence[float], places: int) -> float:
    """Returns the seconds from when the replicas had places for all samples left until the last one ended.

    `ends_s`: seconds at which samples ended. `places`: number of samples that all replicas run at a time.
    """
    ends_s = sorted(ends_s)
    return ends_s[-1] - (ends_s[-places - 1] if len(ends_s) > places else 0.0)


def evened(runs: Mapping[str, Mapping]) -> dict[str, float]:
    """Returns makespans without the differences before the drain: the median time before the drain over all runs, plus
    the median drain of each run. Before the drain tail policies do the same, and differ by other load of the machine.
    """
    heads = [
        whole_s - drained_s
        for run in runs.values()
        for whole_s, drained_s in zip(run["all_makespan_s"], run["all_drain_s"], strict=True)
    ]
    return {name: round(median(heads) + run["drain_s"], 3) for name, run in runs.items()}


async def _ours(client: RolloutClient, policies_of, replay: Replay, replicas: int, repeats: int, history_dir, say):
    """Rolls out every run in turns, with probes before each turn. Returns figures by run, and the probes."""
    await _all_up(client, replicas)
    probes = Probes(client, replicas, say, await engines(client))
    runs = {name: [] for name in policies_of}
    for turn in range(repeats):
        await _all_up(client, replicas)
        await probes.look()
        for name in rotated(tuple(policies_of), turn, repeats):
            await client.forget_history()
            replay.remember(history_dir)
            await client.set_policies(drawn(policies_of[name], turn))
            runs[name].append(await _roll(client, f"{name}-{turn}", replay, replicas))
            say(f"{name}, {turn + 1} of {repeats}: {runs[name][-1]}")
    return {name: middle(all_of) for name, all_of in runs.items()}, probes


async def _suffix(client: RolloutClient, name: str, replay: Replay, replicas: int, say) -> dict:
    """Rolls out a run of WITH_SUFFIX after the earlier checkpoint, which vLLM's suffix cache then holds.

    Runs once, since vLLM's cache then also holds the answers, and cannot be cleared.
    """
    await client.set_policies(Policies(**WITH_SUFFIX[name]))
    await _all_up(client, replicas)
    say("rolling out the earlier checkpoint")
    earlier = RolloutBatch(batch_id=f"{BATCH}-before", groups=tuple(replay.earlier))
    _ = [group async for group in client.rollout(earlier)]
    run = await _roll(client, name, replay, replicas)
    say(f"{name}: {run}")
    return middle([run])


async def _roll(client: RolloutClient, name: str, replay: Replay, replicas: int) -> dict:
    """Rolls out a run, and returns its figures. `name`: unique, since data on groups in flight is kept by batch id."""
    await _all_up(client, replicas)
    places = sum(replica.max_running for replica in (await client.status()).replicas)
    await client.reset_caches()
    heard: list[ReplicasChanged] = []
    listening = asyncio.create_task(_listen(client, heard))
    began_s = time.time()
    try:
        batch = RolloutBatch(batch_id=f"{BATCH}-{name}", groups=tuple(replay.groups), step=replay.step)
        groups = [group async for group in client.rollout(batch)]
    finally:
        listening.cancel()
    if listening.done():  # it ends by an error alone
        listening.result()
    summary = summarise(groups)
    summary["drain_s"] = round(drain_s([s.timings.finished_s for group in groups for s in group.samples], places), 3)
    ended_s = began_s + summary["makespan_s"]
    occupied = occupied_s(heard, began_s, ended_s)
    returned = max(0.0, replicas * summary["makespan_s"] - occupied)  # not -0.0
    kept = {key: summary[key] for key in KEPT}
    return kept | {"replica_s": round(occupied, 3), "returned_replica_s": round(returned, 3)}


async def _listen(client: RolloutClient, heard: list[ReplicasChanged]) -> None:
    async for change in client.replica_changes():
        heard.append(change)


async def _all_up(client: RolloutClient, replicas: int) -> None:
    """Reserves all replicas, as a driver does before a step, and waits until they are up.

    SETTLED_S pass before that, since a replica that the last run gave back at its end may still be up.
    """
    await client.reserve(replicas)
    await asyncio.sleep(SETTLED_S)
    await whole(client, replicas)


def _with(file: ServeFile, engine: Engine, history_dir: Path | None) -> ServeFile:
    """Returns the configuration with other engine settings, and with history in `history_dir` if it is given."""
    file = with_engine(file, dict(engine))
    application = file.application
    context = ContextConfig(history_dir=str(history_dir)) if history_dir else None
    args = application.args.model_copy(update={"context": context})
    return file.model_copy(update={"applications": (application.model_copy(update={"args": args}),)})
