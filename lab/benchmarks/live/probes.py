"""Probes of a running service: rollouts that measure the speed of its steps, prompts and hand-overs of chunks.

A probe replays made-up tokens on all replicas at once, with the same number of chunks on each. Replicas therefore slow
each other down as at work, and all time between two steps counts. No two chunks have KV in common: KV of a shared
prompt that one chunk reads would be in the processor's cache for the others, while real answers share nothing.
Invariant: no probe holds a token of a rollout that is to be predicted. Called by `bench calibrate` and `bench tail`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import mean, median

from tailrace.app.calls.client import RolloutClient
from tailrace.app.step_profile import fit
from tailrace.deployments.coordinator.journal import Journal, read_journal
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch
from tailrace.lab.simulator.hardware import from_profile
from tailrace.lab.simulator.host import simulate
from tailrace.lab.simulator.types import Cluster, ReplicaModel, Workload, WorkloadGroup
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.events import ReplicaJoined, ReplicaMeasured

STEPS = 60
LADDER = ((1, 33), (2, 33), (4, 33), (8, 33), (16, 33), (1, 257), (4, 257), (8, 257), (1, 961), (8, 961))
"""Rungs of the ladder: (chunks on each replica, tokens of each prompt). A rung with more chunks than a replica can run
is left out. All tokens of a prompt but one fill blocks of KV, so that one token alone is computed after a cache hit.
"""

ALONE = ((1, 33), (8, 33))
"""Rungs that are also run on one replica while the others are idle."""

HANDOVER_CHUNK_TOKENS, HANDOVERS = 32, 7
PROMPT_TOKENS = 40

BUSY_CHUNKS = (8, 4, 160)
"""Number of samples on each replica, tokens by which the lengths of their prompts differ, and tokens of each answer.
The difference keeps two samples from handing over at once.
"""

FIRST_TOKEN, TOKENS = 300, 9_000
"""First token id of made-up prompts, and number of ids: ordinary words in any tokenizer's vocabulary."""


def bound(chunk_tokens: int | None) -> Policies:
    """Returns policies that bind whole groups to replicas up front, so that each replica runs its groups of a probe."""
    chunking = {"type": "fixed", "chunk_tokens": chunk_tokens}
    return Policies(ordering="group_static", placement="pinned", chunking=chunking, drafting="off")


def probe(
    name: str, replicas: int, chunks: int, prompt_tokens: int, answer_tokens: int, apart: int = 0
) -> RolloutBatch:
    """Returns groups of one sample each, `chunks` for each replica, in order of the replicas that `bound` gives them.

    No two prompts begin with the same token. Each is `apart` tokens longer than the one before it on its replica.
    """
    forced = (tuple(FIRST_TOKEN + step % TOKENS for step in range(answer_tokens - 1)),)
    groups = []
    for index, number in product(range(replicas), range(chunks)):
        tokens = range(prompt_tokens + apart * number)
        prompt = tuple(FIRST_TOKEN + (7 * position + 101 * index + 11 * number) % TOKENS for position in tokens)
        groups.append(
            PromptGroup(
                prompt_id=f"p{index}-{number}", token_ids=prompt, samples=1, max_tokens=answer_tokens,
                forced_token_ids=forced,
            )
        )  # fmt: skip
    return RolloutBatch(batch_id=name, groups=tuple(groups))


def shortened(batch: RolloutBatch, name: str, first: int = 0) -> RolloutBatch:
    """Returns a batch of the same prompts under another name. Answers of the groups from `first` on have two tokens."""
    kept, rest = batch.groups[:first], batch.groups[first:]
    ends = ({"max_tokens": 2, "forced_token_ids": (group.forced_token_ids[0][:1],)} for group in rest)
    short = (group.model_copy(update=end) for group, end in zip(rest, ends, strict=True))
    return batch.model_copy(update={"batch_id": name, "groups": (*kept, *short)})


async def step_by_step(client: RolloutClient, batch: RolloutBatch, chunks: int) -> list[GroupResult]:
    """Rolls out a probe. If several chunks share a replica, their prompts are computed before the measured rollout."""
    await client.reset_caches()
    if chunks > 1:
        _ = [group async for group in client.rollout(shortened(batch, f"{batch.batch_id}-prompts"))]
    return [group async for group in client.rollout(batch)]


async def climb(client: RolloutClient, name: str, replicas: int, max_running: int) -> dict:
    """Measures the rungs of LADDER. Returns `steps`, a row for each rung, and `prefill`, a row for each with one chunk.

    A row holds the size of the work, and its time in milliseconds.
    """
    await client.set_policies(bound(None))
    steps, prefill = [], []
    for chunks, prompt_tokens in (rung for rung in LADDER if rung[0] <= max_running):
        batch = probe(f"{name}-{chunks}x{prompt_tokens}", replicas, chunks, prompt_tokens, STEPS + 1)
        groups = await step_by_step(client, batch, chunks)
        context = prompt_tokens + STEPS // 2
        took_ms = round(step_ms(groups), 3)
        steps.append({"chunks": chunks, "draft_tokens": 0, "context_tokens": context, "step_ms": took_ms})
        if chunks == 1:
            took_ms = 1e3 * mean(sample.timings.prefill_s for group in groups for sample in group.samples)
            prefill.append({"tokens": prompt_tokens, "prefill_ms": round(took_ms, 3)})
    return {"steps": steps, "prefill": prefill}


async def alone(client: RolloutClient, name: str, replicas: int, ladder: dict) -> float:
    """Returns the time of a step while no other replica is busy, over its time in `ladder`: the mean over ALONE."""
    together = {(step["chunks"], step["context_tokens"]): step["step_ms"] for step in ladder["steps"]}
    shares = []
    for chunks, prompt_tokens in ALONE:
        if (rung := (chunks, prompt_tokens + STEPS // 2)) in together:
            whole = probe(f"{name}-{chunks}x{prompt_tokens}", replicas, chunks, prompt_tokens, STEPS + 1)
            groups = await step_by_step(client, shortened(whole, whole.batch_id, first=chunks), chunks)
            shares.append(step_ms([group for group in groups if group.prompt_id.startswith("p0-")]) / together[rung])
    return mean(shares)


async def drafted_steps(client: RolloutClient) -> list[dict]:
    """Returns the times of steps that verify many tokens, as engines measured them at their start without context.

    The rows are like `climb`'s `steps`, with one chunk each.
    """
    found = [one.performance for one in (await client.status()).replicas if one.performance is not None]
    return [
        {"chunks": 1, "draft_tokens": tokens - 1, "context_tokens": 0, "step_ms": 1e3 * took_s}
        for one in found
        for tokens, took_s in zip(one.step_tokens, one.step_seconds, strict=True)
    ]


async def stepped(client: RolloutClient) -> tuple[int, float]:
    """Returns the number of steps of all replicas since they started, and their seconds, at most a second old."""
    work = [replica.work for replica in (await client.status()).replicas]
    return sum(one.get("steps", 0) for one in work), sum(one.get("step_us", 0) for one in work) / 1e6


def step_ms(groups: Sequence[GroupResult]) -> float:
    """Returns the milliseconds of a step: the median over the chunks of each replica, then the mean over replicas."""
    took_s: dict[str, list[float]] = {}
    for group in groups:
        sample = group.samples[0]
        replica = group.prompt_id.partition("-")[0]
        took_s.setdefault(replica, []).append(sample.timings.decode_s / (len(sample.token_ids) - 1))
    return 1e3 * mean(map(median, took_s.values()))


async def hand_over(client: RolloutClient, name: str, replicas: int) -> float:
    """Returns the mean seconds between two chunks of a sample in which no step computes the sample.

    The sample is alone on its replica, and stays there.
    """
    await client.set_policies(bound(HANDOVER_CHUNK_TOKENS))
    idle_s = []
    for chunks in (1, 1 + HANDOVERS):
        await client.reset_caches()
        batch = probe(f"{name}-{chunks}", replicas, 1, PROMPT_TOKENS, chunks * HANDOVER_CHUNK_TOKENS)
        timings = [group.samples[0].timings async for group in client.rollout(batch)]
        idle_s.append(mean(t.finished_s - t.started_s - t.prefill_s - t.decode_s for t in timings))
    return (idle_s[1] - idle_s[0]) / HANDOVERS


def crowd(name: str, replicas: int) -> RolloutBatch:
    """Returns a probe with prompts of different lengths, see BUSY_CHUNKS."""
    samples, apart, answer_tokens = BUSY_CHUNKS
    return probe(name, replicas, samples, PROMPT_TOKENS, answer_tokens, apart)


async def busy_hand_overs(client: RolloutClient, name: str, replicas: int) -> float:
    """Returns the seconds by which a `crowd` takes longer in chunks than whole. While some hand over, others run."""
    took_s = []
    for chunk_tokens in (None, HANDOVER_CHUNK_TOKENS):
        await client.set_policies(bound(chunk_tokens))
        await client.reset_caches()
        batch = crowd(f"{name}-{chunk_tokens or 'whole'}", replicas)
        groups = [group async for group in client.rollout(batch)]
        took_s.append(max(group.samples[0].timings.finished_s for group in groups))
    return took_s[1] - took_s[0]


async def engines(client: RolloutClient) -> tuple[list[ReplicaJoined], list[ReplicaMeasured]]:
    """Returns the last `ReplicaJoined` and the last `ReplicaMeasured` of each replica in the journal of a rollout."""
    await client.journal(True)
    await client.set_policies(bound(None))
    _ = [group async for group in client.rollout(probe("engines", 1, 1, PROMPT_TOKENS, 2 * STEPS))]
    journal: Journal = read_journal((await client.journal(False)).splitlines())
    found = {kind: {} for kind in (ReplicaJoined, ReplicaMeasured)}
    for entry in journal.entries:
        if type(entry) in found:
            found[type(entry)][entry.replica_id] = entry
    return list(found[ReplicaJoined].values()), list(found[ReplicaMeasured].values())


def model_of(
    profile: dict, joined: Sequence[ReplicaJoined], measured: Sequence[ReplicaMeasured], handover_s: float
) -> ReplicaModel:
    """Returns the model of a replica by its profile, its own reports and the time of a hand-over.

    The model has the save of KV separately, so its seconds are subtracted from `handover_s`.
    """
    pools = [one.performance for one in measured if one.performance.fetch_token_s]
    model = from_profile(
        profile,
        kv_capacity_tokens=joined[0].kv_capacity_blocks * joined[0].block_tokens,
        max_running=joined[0].max_running,
        fetch_tokens_s=mean(1 / one.fetch_token_s for one in pools) if pools else 0.0,
        fetch_base_s=mean(one.fetch_base_s for one in pools) if pools else 0.0,
    )
    save_s = model.fetch_base_s + HANDOVER_CHUNK_TOKENS / model.fetch_tokens_s if pools else 0.0
    return replace(model, block_tokens=joined[0].block_tokens, handover_s=max(0.0, handover_s - save_s))


def joining(model: ReplicaModel, replicas: int, busy_s: float) -> ReplicaModel:
    """Returns the model with `join_s`, the time of its replica that a joining chunk takes.

    `join_s` is what `busy_hand_overs` measured, `busy_s`, less what `model` predicts for the same crowd, divided by the
    hand-overs of a replica.
    """
    samples, _, answer_tokens = BUSY_CHUNKS
    groups = crowd("crowd", replicas).groups
    work = Workload(
        "crowd", answer_tokens, (tuple(WorkloadGroup(g.prompt_id, len(g.token_ids), (answer_tokens,)) for g in groups),)
    )
    whole_s, chunked_s = (
        simulate(work, Cluster(model, replicas, replicas), bound(tokens)).makespan_s
        for tokens in (None, HANDOVER_CHUNK_TOKENS)
    )
    hand_overs = samples * (-(-answer_tokens // HANDOVER_CHUNK_TOKENS) - 1)
    return replace(model, join_s=max(0.0, (busy_s - chunked_s + whole_s) / hand_overs))


def pooled(ladders: Sequence[Mapping]) -> dict:
    """Returns one profile of several ladders, in the form of `tailrace profile`. Prompts have their mean times."""
    steps = [step for ladder in ladders for step in ladder["steps"]]
    by_tokens: dict[int, list[float]] = {}
    for one in (one for ladder in ladders for one in ladder["prefill"]):
        by_tokens.setdefault(one["tokens"], []).append(one["prefill_ms"])
    return {"steps": steps, "prefill_ms": {n: round(mean(took), 3) for n, took in by_tokens.items()}, "fit": fit(steps)}


@dataclass
class Probes:
    """Measurements of the replicas, each list in order of time. `told`: the replicas' own reports, from `engines`."""

    client: RolloutClient
    replicas: int
    say: Callable[[str], None]
    told: tuple
    drafted: list[dict] = field(default_factory=list)
    ladders: list[dict] = field(default_factory=list)
    handovers: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)

    async def look(self) -> None:
        """Runs all probes once.

        The engines' times of steps that verify drafts are read the first time alone: later ones have unknown contexts.
        """
        self.drafted = self.drafted or await drafted_steps(self.client)
        await self._climb()
        await self._hand_over()

    async def _climb(self) -> None:
        number = len(self.ladders)
        found = await climb(self.client, f"ladder-{number}", self.replicas, self.told[0][0].max_running)
        self.ladders.append(found)
        took = {f"{one['chunks']}x{one['context_tokens']}": one["step_ms"] for one in found["steps"]}
        self.say(f"probes: steps of {took} ms")

    async def _hand_over(self) -> None:
        """Measures steps on one busy replica, against the last ladder, and hand-overs on idle and on busy replicas."""
        number, client = len(self.ladders), self.client
        self.alone.append(round(await alone(client, f"alone-{number}", self.replicas, self.ladders[-1]), 4))
        self.handovers.append(await hand_over(client, f"hand-over-{number}", self.replicas))
        self.busy.append(await busy_hand_overs(client, f"crowd-{number}", self.replicas))
        self.say(
            f"probes: steps take {self.alone[-1]:.2f} of it alone, a hand-over {self.handovers[-1]:.3f} s; chunks of "
            f"{HANDOVER_CHUNK_TOKENS} take {self.busy[-1]:.2f} s more"
        )

    def steps(self) -> list[dict]:
        """Returns the steps of all ladders, and the steps that verify drafts."""
        return [step for found in self.ladders for step in found["steps"]] + self.drafted

    def drafting(self, profile: dict) -> dict:
        """Returns the profile with another fit, which includes the steps that verify drafts."""
        return profile | {"fit": fit(self.steps())}

    def models(self, profile: dict) -> tuple[ReplicaModel, ReplicaModel]:
        """Returns the model of a replica whose steps are as in `profile`, and of one that verifies drafts."""
        handover_s, share = median(self.handovers), min(1.0, median(self.alone))
        plain, drafting = (model_of(one, *self.told, handover_s) for one in (profile, self.drafting(profile)))
        join_s = joining(plain, self.replicas, median(self.busy)).join_s
        return tuple(replace(model, join_s=join_s, alone_share=share) for model in (plain, drafting))
