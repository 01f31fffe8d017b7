"""Benchmark of recorded agent sessions on modelled replicas: Tailrace's core, by whole trajectories, and other routers.

Every system has the same replicas, the same steps and the same bytes of HBM and DRAM. `SIZES`: tokens of KV in the
larger tier, over the tokens of all open sessions at their mean context. Rates are those of a window in the middle of a
long run.
"""

from collections.abc import Callable, Sequence

import numpy as np

from tailrace.lab.simulator.agents.figures import ASSUMPTIONS, AgentReplica
from tailrace.lab.simulator.agents.host import AgentHost, Router
from tailrace.lab.simulator.agents.request import AgentCounts
from tailrace.lab.simulator.agents.routers import LongestPrefix, RoundRobinPool, Sticky
from tailrace.lab.simulator.agents.scheduled import Scheduled
from tailrace.lab.simulator.agents.trace import AgentSession

SIZES = {"plenty": 1.5, "all": 1.0, "half": 0.5, "quarter": 0.25}

MARGIN = 32
"""Maximum number of requests by which `prefix` lets a replica be busier than the least busy one. It is the best of 4,
8, 16 and 32 at size `all`; at size `plenty` the four are alike.
"""

DRAFTS = {"tailrace": 2.36, "others": 2.04}
"""Tokens per verification with --drafts, for completions of code with 15 mates: by our index, and by Arctic's rule,
which is vLLM's suffix decoding (docs/measurements/drafts.md). Each verification computes four more tokens than a step
without drafts.
"""

WARM_SHARE, MEASURED_SHARE = 0.25, 0.5
"""Shares of all turns of the trace: turns before the window, and turns in the window."""


def measure(
    sessions: Sequence[AgentSession], model: AgentReplica, replicas: int, drafts: bool, sizes: Sequence[str],
    gap_cap_s: float, say: Callable[[str], None],
) -> dict:  # fmt: skip
    """Returns the figures by size, as `sizes`, and `assumptions` with their sources. A size has the figures of
    Tailrace, its ratios to the best rival and to `sticky`, and the rivals' figures.
    """
    turns = [turn for session in sessions for turn in session.turns]
    context = sum(turn.context for turn in turns) / len(turns)
    whole_s = sum(map(model.work_s, turns)) / len(sessions)
    most = replicas * max(model.hbm_tokens, model.dram_tokens + model.ssd_tokens)
    found = {}
    for size in sizes:
        load = max(1, round(most / context / SIZES[size]))
        systems = {}
        for name, router in _routers().items():
            made = DRAFTS.get(name, DRAFTS["others"]) if drafts else 1.0
            host = AgentHost(
                sessions=sessions,
                model=model,
                replicas=replicas,
                router=router,
                load=load,
                drafts=(made, 5.0 if drafts else 1.0),
            )
            counts, took_s = host.run(int(WARM_SHARE * len(turns)), int(MEASURED_SHARE * len(turns)))
            systems[name] = _figures(counts, took_s, whole_s)
            say(f"{size}, {load} sessions, {name}: {systems[name]}")
        found[size] = {"sessions": load} | compared(systems)
    return {
        "replicas": replicas,
        "sessions_recorded": len(sessions),
        "turns": len(turns),
        "mean_context_tokens": round(context),
        "hbm_tokens": model.hbm_tokens * replicas,
        "dram_tokens": model.dram_tokens * replicas,
        "gap_cap_s": gap_cap_s,
        "drafts": DRAFTS if drafts else None,
        "sizes": found,
        "assumptions": ASSUMPTIONS,
    }


def _routers() -> dict[str, Router]:
    return {
        "sticky": Sticky(),
        "prefix": LongestPrefix(MARGIN),
        "round_robin_pool": RoundRobinPool(),
        "tailrace": Scheduled(),
    }


def _figures(counts: AgentCounts, took_s: float, whole_s: float) -> dict:
    """Returns the figures of one system. `whole_s`: mean seconds of work of a session; the work of the turns that ended
    counts as trajectories of this length. `fetch_share`: share of the seconds from a request's arrival at a replica to
    its first token in which KV was fetched.
    """
    known = max(1, counts.known)
    first_s, late_s = np.percentile(counts.waits, (50, 99)) if counts.waits else (0.0, 0.0)
    return {
        "trajectories_per_h": round(counts.work_s / whole_s / took_s * 3600, 2),
        "recomputed_share": round(counts.recomputed / known, 4),
        "ttft_p50_s": round(float(first_s), 2),
        "ttft_p99_s": round(float(late_s), 2),
        "fetch_p50_s": round(float(np.median(counts.fetches or [0.0])), 3),
        "fetch_share": round(sum(counts.fetches) / max(1e-9, sum(counts.at_replica)), 3),
        "hits": {tier: round(getattr(counts, tier) / known, 4) for tier in ("hbm", "dram", "ssd")},
        "preemptions": counts.preemptions,
        "suspended": counts.suspended,
    }


def compared(systems: dict[str, dict]) -> dict:
    """Returns the figures of `tailrace`, its ratios to the best rival and to `sticky`, and the rivals' figures."""
    ours, rivals = systems["tailrace"], {name: of for name, of in systems.items() if name != "tailrace"}
    rate = ours["trajectories_per_h"]
    best = max(rivals, key=lambda name: rivals[name]["trajectories_per_h"])
    return {
        "ratio_to_best": round(rate / rivals[best]["trajectories_per_h"], 3),
        "ratio_to_sticky": round(rate / rivals["sticky"]["trajectories_per_h"], 3),
        "best": best,
        **ours,
        "rivals": rivals,
    }
