"""`tailrace bench agents`: recorded sessions of agents, scheduled by trajectory and by other services' routers."""

from pathlib import Path

import click

from tailrace.app.errors import BadInput
from tailrace.lab.benchmarks.commands.output import AS_JSON, print_result, say


@click.command("agents")
@click.option("--trace", type=click.Path(path_type=Path), required=True,
              help="Recorded sessions, JSONL or JSONL.gz: docs/measurements/agents.md.")  # fmt: skip
@click.option("--sizes", default="plenty,all,half,quarter", show_default=True,
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
@click.option("--drafts", is_flag=True, help="With drafts: the rivals' by suffixes, ours by the group.")
@AS_JSON
def command(trace, sizes, sessions, max_context, gap_cap, drafts, as_json, **cluster):
    """Sessions of agents on modelled replicas: trajectories an hour, by how much KV there is. Two minutes.

    `sticky`: each session on one replica, by hash. `prefix`: the replica with the longest cached prefix, else the
    least loaded one. `round_robin_pool`: any replica, with KV from a shared pool.
    """
    from tailrace.lab.benchmarks.control_plane.agents import SIZES, measure
    from tailrace.lab.simulator.agents.figures import agent_replica
    from tailrace.lab.simulator.agents.trace import read_sessions

    names = sizes.split(",")
    if unknown := [name for name in names if name not in SIZES]:
        raise BadInput(f"--sizes {unknown[0]}: no such size; give some of {', '.join(SIZES)} with commas between")
    replicas, dram, ssd = (cluster.pop(key) for key in ("replicas", "dram_gb", "ssd_gb"))
    try:
        model = agent_replica(dram_bytes=dram * 1e9, ssd_bytes=ssd * 1e9, **cluster)
    except ValueError as error:
        raise BadInput(f"--model, --gpu: {error}") from error
    if max_context > model.hbm_tokens // 2:
        raise BadInput(
            f"--max-context {max_context}: a replica has KV for {model.hbm_tokens}; give half of that at most"
        )
    try:
        found = read_sessions(trace, gap_cap, max_context)[:sessions]
    except ValueError as error:
        raise BadInput(f"--trace {error}") from error
    print_result(measure(found, model, replicas, drafts, names, gap_cap, say), as_json)
