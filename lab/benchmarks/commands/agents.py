"""`tailrace bench agents`: recorded sessions of agents, scheduled by trajectory and by other services' routers."""

from functools import partial
from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput
from tailrace.lab.benchmarks.commands.output import AS_JSON, print_result, say


@click.command("agents")
@click.option("--trace", type=click.Path(path_type=Path), required=True,
              help="Recorded sessions, JSONL or JSONL.gz: docs/measurements/agents.md.")  # fmt: skip
@click.option("--sizes", show_default="plenty,all,half,quarter; live: all,half",
              help="Of KV, over the contexts of all open sessions: 1.5, 1, 0.5, 0.25.")  # fmt: skip
@click.option("--sessions", type=click.IntRange(min=1), help="The first ones of the trace; all without it.")
@click.option("--replicas", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--model", default="Qwen2.5-7B-Instruct-1M", show_default=True, help="A dense model.")
@click.option("--gpu", default="H100", show_default=True)
@click.option("--gpus-per-replica", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--max-context", type=click.IntRange(min=1), default=262_144, show_default=True,
              help="Tokens; a session ends before a longer one.")  # fmt: skip
@click.option("--gap-cap", type=click.FloatRange(min=0), default=60.0, show_default=True,
              help="Longest seconds between two turns: people pause for hours.")  # fmt: skip
@click.option("--dram-gb", type=click.FloatRange(min=0), default=128.0, show_default=True,
              help="DRAM for KV, for each GPU; 0: HBM alone.")  # fmt: skip
@click.option("--ssd-gb", type=click.FloatRange(min=0), default=0.0, show_default=True,
              help="SSD for KV, for each GPU.")  # fmt: skip
@click.option("--pool-gbit", type=click.FloatRange(min=1), default=400.0, show_default=True,
              help="Network of the pool, Gbit/s, for each GPU.")  # fmt: skip
@click.option("--drafts", is_flag=True, help="With drafts: the rivals' by suffixes, ours by the group.")
@click.option("--live", is_flag=True, help="Instead: on two replicas and two `vllm serve`, with the model of --config.")
@click.option("--turns", type=click.IntRange(min=2), default=4, show_default=True,
              help="With --live: the first ones of each session that has as many.")  # fmt: skip
@click.option("--factor", type=click.FloatRange(min=1), default=64.0, show_default=True,
              help="With --live: divides the tokens of contexts and answers.")  # fmt: skip
@click.option("--gap-factor", type=click.FloatRange(min=1), default=8.0, show_default=True,
              help="With --live: divides the gaps.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True,
              help="With --live: runs of each size, by turns; figures are those of the median run.")  # fmt: skip
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG.with_name("serve.http.yaml"),
              show_default="serve.http.yaml", help="With --live: its model, pool and gateway.")  # fmt: skip
@AS_JSON
def command(trace, sizes, sessions, gap_cap, live, as_json, **more):
    """Measure trajectories an hour of recorded agent sessions on modelled replicas, by the size of the KV. Two minutes.

    `sticky`: each session stays on one replica, chosen by hash. `prefix`: the replica with the longest cached prefix,
    else the least loaded one. `round_robin_pool`: any replica, with KV from a shared pool.

    With --live the same sessions, scaled down, are played over HTTP on real engines, in about ten minutes. `sticky` is
    then two `vllm serve`.
    """
    names = (sizes or ("all,half" if live else "plenty,all,half,quarter")).split(",")
    from tailrace.lab.benchmarks.control_plane.agents import SIZES

    if unknown := [name for name in names if name not in SIZES]:
        raise BadInput(f"--sizes {unknown[0]}: no such size; give some of {', '.join(SIZES)} with commas between")
    read = partial(_read, trace, gap_cap, sessions)
    print_result((_live if live else _simulated)(read, names, gap_cap, more), as_json)


def _read(trace: Path, gap_cap: float, sessions: int | None, max_context: int):
    from tailrace.lab.simulator.agents.trace import read_sessions

    try:
        return read_sessions(trace, gap_cap, max_context)[:sessions]
    except ValueError as error:
        raise BadInput(f"--trace {error}") from error


def _live(read, names: list[str], gap_cap: float, given: dict) -> dict:
    from tailrace.lab.benchmarks.live.agents import max_context, measure

    file, factor = load_config(given["config"]), given["factor"]
    if file.gateway is None or file.application.args.pool is None:
        raise BadInput(f"--config {given['config']}: it needs a gateway and a pool; serve.http.yaml has both")
    sessions = read(max_context(factor))
    found = measure(file, sessions, given["turns"], factor, given["gap_factor"], names, given["repeats"], say)
    return {"gap_cap_s": gap_cap, "live": found}


def _simulated(read, names: list[str], gap_cap: float, given: dict) -> dict:
    from tailrace.lab.benchmarks.control_plane.agents import measure
    from tailrace.lab.simulator.agents.figures import agent_replica

    cluster = {key: given[key] for key in ("gpu", "model", "gpus_per_replica")}
    try:
        tiers = {"dram_bytes": given["dram_gb"] * 1e9, "ssd_bytes": given["ssd_gb"] * 1e9}
        model = agent_replica(**cluster, **tiers, pool_bytes_s=given["pool_gbit"] * 1e9 / 8)
    except ValueError as error:
        raise BadInput(f"--model, --gpu: {error}") from error
    if given["max_context"] > model.hbm_tokens // 2:
        raise BadInput(
            f"--max-context {given['max_context']}: a replica has KV for {model.hbm_tokens}; give half of that at most"
        )
    return measure(read(given["max_context"]), model, given["replicas"], given["drafts"], names, gap_cap, say)
