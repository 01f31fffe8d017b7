"""Recorded sessions of agents on two real replicas: Tailrace's scheduling by trajectory against other routers.

The systems run one after the other. Each has two engines with the same model and settings, and one core for each
engine. `sticky` is two `vllm serve`, to which sessions are assigned in turn, each for all its turns. `sticky_more_kv`
is the same with as much more KV as Tailrace's pool holds. Tailrace runs with the policy `by_kv`, and as
`round_robin_pool`. All sessions of a size are open at once, from the start. Each repeat has different prompts.
Called by `bench agents --live`.
"""

import asyncio
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from tailrace.app.calls.client import RolloutClient
from tailrace.app.config import ServeFile, with_engine
from tailrace.app.errors import BadInput, Failed
from tailrace.app.http.client import Client
from tailrace.app.model import resolve_model
from tailrace.deployments.replica_count import fixed
from tailrace.lab.benchmarks.control_plane.agents import SIZES, compared
from tailrace.lab.benchmarks.http import servers
from tailrace.lab.benchmarks.live.agent_replay import Opener, Place, PlayedTurn, figures, play, scaled
from tailrace.lab.simulator.agents.scheduled import POLICIES
from tailrace.lab.simulator.agents.trace import AgentSession
from tailrace.policies.families.registry import Policies

MAX_MODEL_LEN, ROOM_TOKENS = 2048, 128
"""Maximum tokens of a context, and the part of them that recorded contexts leave free: scaled answers keep at least one
token, which makes contexts longer.
"""

MAX_RUNNING, BATCHED_TOKENS = 16, 2048
REPLICAS = 2

KV_TOKENS = 2304
"""Tokens of KV of each engine: a little more than vLLM demands for MAX_MODEL_LEN."""

POOL_FACTOR = 2
"""Ratio of the pool's KV to the KV of all engines; 2.2 in the simulated comparison."""

OURS = {
    "tailrace": POLICIES,
    "round_robin_pool": POLICIES | {"placement": "round_robin", "trajectories": "all_at_once"},
}
"""Policies of the runs of Tailrace. `round_robin_pool` has Tailrace's engine and pool, since vLLM's connector to
Mooncake needs a GPU.
"""

SETTLED_S = 3.0
"""Seconds after which every replica has reported its counts."""

Played = tuple[dict, list[list[PlayedTurn]]]
"""Figures of one run, and the turns of its sessions."""

Runs = dict[str, list[Played]]
"""Runs of one system by size."""

Plan = list[tuple[str, str, list[AgentSession]]]
"""Size, salt and sessions of each run."""

Say = Callable[[str], None]


def max_context(factor: float) -> int:
    """Returns the maximum context of recorded sessions in tokens, before they are divided by `factor`."""
    return int((MAX_MODEL_LEN - ROOM_TOKENS) * factor)


def measure(
    file: ServeFile, sessions: Sequence[AgentSession], turns: int, factor: float, gap_factor: float,
    sizes: Sequence[str], repeats: int, say: Say,
) -> dict:  # fmt: skip
    """Returns `sizes` in the form of the simulated comparison, with the figures of each system's median run, and the
    rates of all runs. `identical`: for each system, the share of its answers that equal those of `tailrace`.

    Raises BadInput if the trace has too few sessions, Failed if `round_robin_pool` has other answers than `tailrace`.
    """
    model = resolve_model(file.application.args.engine.model)
    cut = [scaled(one, turns, factor, gap_factor) for one in sessions if len(one.turns) >= turns]
    contexts = [turn.context for one in cut for turn in one.turns]
    context = sum(contexts) / max(1, len(contexts))
    pool_tokens = POOL_FACTOR * REPLICAS * KV_TOKENS
    loads = {size: max(1, round(pool_tokens / max(1.0, context) / SIZES[size])) for size in sizes}
    if len(cut) < (most := max(loads.values())):
        raise BadInput(f"--trace: {len(cut)} sessions of {turns} turns, and {most} are needed; give fewer --turns")
    work = {size: [cut[place * len(cut) // load] for place in range(load)] for size, load in loads.items()}
    plan = [(size, f"{size}-{number}", sessions) for size, sessions in work.items() for number in range(repeats)]
    with tempfile.TemporaryDirectory(prefix="tailrace-agents-") as scratch:
        found = _ours(file, model, pool_tokens, plan, say) | {
            "sticky": _vllm(Path(scratch), model, KV_TOKENS, plan, say),
            "sticky_more_kv": _vllm(Path(scratch), model, KV_TOKENS * (1 + POOL_FACTOR), plan, say),
        }
    return {
        "repeats": repeats,
        "turns": turns,
        "factor": factor,
        "gap_factor": gap_factor,
        "mean_context_tokens": round(context),
        "engine_kv_tokens": KV_TOKENS,
        "pool_kv_tokens": pool_tokens,
        "sizes": {size: {"sessions": loads[size]} | _size({name: of[size] for name, of in found.items()})
                  for size in sizes},
    }  # fmt: skip


def _size(systems: dict[str, list[Played]]) -> dict:
    ours = _answers(systems["tailrace"])
    identical = {}
    for name, runs in systems.items():
        identical[name] = round(sum(map(tuple.__eq__, ours, _answers(runs))) / len(ours), 4)
    if identical["round_robin_pool"] < 1.0:
        raise Failed("agents: round_robin_pool made other tokens than tailrace")
    return compared({name: median_run([of for of, _ in runs]) for name, runs in systems.items()}) | {
        "identical": identical
    }


def median_run(runs: Sequence[dict]) -> dict:
    """Returns the figures of the run with the median rate, and the rates of all runs in order."""
    by_rate = sorted(runs, key=lambda of: of["trajectories_per_h"])
    return by_rate[(len(runs) - 1) // 2] | {"runs_per_h": [of["trajectories_per_h"] for of in runs]}


def _answers(runs: Sequence[Played]) -> list[tuple[int, ...]]:
    return [turn.token_ids for _, played in runs for of in played for turn in of]


def token_bytes(model: Path) -> int:
    """Returns the bytes of a token's KV in float32."""
    shape = json.loads((model / "config.json").read_text())
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return 2 * 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head


# ---- vLLM ------------------------------------------------------------------------------------------------


def _vllm(scratch: Path, model: Path, kv_tokens: int, plan: Plan, say: Say) -> Runs:
    kv_gib = kv_tokens * token_bytes(model) / 2**30
    shape = servers.EngineShape(model, MAX_RUNNING, MAX_MODEL_LEN, kv_gib, BATCHED_TOKENS)
    flags = ("--enable-prompt-tokens-details",)
    say(f"two `vllm serve` with KV for {kv_tokens} tokens each: starting")
    with ExitStack() as stack:
        logs = [scratch / f"vllm-{kv_tokens}-{core}.log" for core in range(REPLICAS)]
        started = [servers.vllm(shape, log, flags, core) for core, log in enumerate(logs)]
        with ThreadPoolExecutor(REPLICAS) as pool:
            addresses = list(pool.map(stack.enter_context, started))

        @asynccontextmanager
        async def opener(number: int) -> AsyncIterator[Place]:
            yield f"{addresses[number % REPLICAS]}/v1/completions", {}

        return asyncio.run(_all(plan, model.name, opener, say))


async def _all(plan: Plan, model: str, opener: Opener, say: Say) -> Runs:
    found = defaultdict(list)
    await play([_first(plan)] * REPLICAS, "warm-up", model, opener)
    for size, salt, sessions in plan:
        seconds, played = await play(sessions, salt, model, opener)
        found[size].append((figures(seconds, played), played))
        say(f"{salt}, {len(sessions)} sessions: {found[size][-1][0]}")
    return found


def _first(plan: Plan) -> AgentSession:
    """Returns a session with one turn, with which a server warms up."""
    session = plan[0][2][0]
    return AgentSession(session.session_id, session.turns[:1])


# ---- Tailrace --------------------------------------------------------------------------------------------


def _ours(file: ServeFile, model: Path, pool_tokens: int, plan: Plan, say: Say) -> dict[str, Runs]:
    os.environ.update(servers.NICENESS)
    from tailrace.app.cluster import service

    port = servers.free_port()
    say(f"tailrace, with KV for {KV_TOKENS} tokens on each replica and {pool_tokens} in the pool: starting")
    with service(_with(file, token_bytes(model), pool_tokens, port), None) as client:
        address = f"http://127.0.0.1:{port}"
        servers.await_health(address)
        return asyncio.run(_turns(client, address, model.name, plan, say))


def _with(file: ServeFile, token: int, pool_tokens: int, port: int) -> ServeFile:
    """Returns the configuration with the engines and the pool of the comparison."""
    engine = file.application.args.engine
    settings = {
        "max_model_len": MAX_MODEL_LEN, "max_running": MAX_RUNNING, "max_batched_tokens": BATCHED_TOKENS,
        "kv_cache_gib": KV_TOKENS * token / 2**30, "block_tokens": 32, "cores": 1, "dtype": servers.DTYPE,
        "draft": engine.draft.model_copy(update={"method": "off"}),
    }  # fmt: skip
    application = with_engine(file, settings).application
    pool = application.args.pool.model_copy(update={"dram_gib": pool_tokens * token / 2**30})
    gateway = file.gateway.model_copy(update={"args": file.gateway.args.model_copy(update={"port": port})})
    applications = (application.with_args(replicas=fixed(REPLICAS), pool=pool), gateway)
    return file.model_copy(update={"applications": applications})


async def _turns(client: RolloutClient, address: str, model: str, plan: Plan, say: Say) -> dict[str, Runs]:
    """Plays each run of the plan with the policies of each system of OURS."""
    http = Client(address, token=None)
    found: dict[str, Runs] = {name: defaultdict(list) for name in OURS}
    await play([_first(plan)] * REPLICAS, "warm-up", model, _trajectories(http, "warm-up"))
    for place, (size, salt, sessions) in enumerate(plan):
        for name in list(OURS)[:: -1 if place % 2 else 1]:
            await client.set_policies(Policies(**OURS[name]))
            await client.reset_caches()
            before = await _computed(client)
            seconds, played = await play(sessions, salt, model, _trajectories(http, salt))
            await asyncio.sleep(SETTLED_S)
            of = figures(seconds, played, await _computed(client) - before)
            found[name][size].append((of, played))
            say(f"{salt}, {len(sessions)} sessions, {name}: {of}")
    http.close()
    return found


def _trajectories(http: Client, salt: str) -> Opener:
    @asynccontextmanager
    async def opener(number: int) -> AsyncIterator[Place]:
        async with await http.trajectory(group=f"{salt}-{number}") as trajectory:
            key = {"authorization": f"Bearer {trajectory.api_key}"}
            yield f"{trajectory.base_url}/completions", key

    return opener


async def _computed(client: RolloutClient) -> int:
    """Returns the number of context tokens whose KV was computed so far, over all replicas."""
    counts = (await client.status()).pool.counts
    return sum(count for name, count in counts.items() if name.partition(".")[0] == "recomputed_tokens")
