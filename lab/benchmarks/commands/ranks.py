"""`tailrace bench ranks`: seconds of a weights update from every rank of a trainer, and the size of deltas."""

from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config, with_engine
from tailrace.app.errors import BadInput
from tailrace.lab.benchmarks.commands.output import AS_JSON, print_result, say

RATES = (2e-5, 1e-6)
"""Learning rates for which deltas are measured: that of examples/train.yaml, and the default."""

USUAL = "one,fsdp2_2,fsdp2_4,tensor_2,fsdp2_2_apart,fsdp2_2_http"


@click.command("ranks")
@click.option("--layouts", default=USUAL, show_default=True, help="Names with commas between.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Updates of each layout.")
@click.option("--samples", type=click.IntRange(min=1), default=8, show_default=True, help="Decoding meanwhile.")
@click.option("--model", default=None, help="A model's folder; by default the configuration's.")
@click.option("--deltas/--no-deltas", default=True, show_default=True, help="Also deltas after steps of AdamW.")
@click.option("--link-mbit", type=click.FloatRange(min=1), help="Mbit/s between ranks and the gateway, over HTTP.")
@click.option("--link-ms", type=click.FloatRange(min=0), default=0.0, help="The same: milliseconds there and back.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@AS_JSON
def command(layouts, repeats, samples, model, deltas, link_mbit, link_ms, config, as_json):
    """Update two replicas that decode, from trainers of 1, 2 and 4 rank processes: FSDP2 and tensor parallelism.

    `update_s`: seconds until all replicas hold the version. `blocked_s`: seconds until the slowest rank may change its
    tensors. `paused_s`: seconds in which an engine makes no token. `link_bytes`: bytes over the link of --link-mbit.
    `delta_share`: bytes of a step's compressed XOR over all bytes. About ten minutes.
    """
    from tailrace.lab.benchmarks.live.rank_process import LAYOUTS

    names = layouts.split(",")
    if unknown := [name for name in names if name not in LAYOUTS]:
        raise BadInput(f"--layouts {layouts}: no layout {unknown[0]!r}; there are {', '.join(LAYOUTS)}")
    file = load_config(config)
    if model is not None:
        file = with_engine(file, {"model": model})
    from tailrace.app.model import resolve_model
    from tailrace.lab.benchmarks.live.ranks import RanksBench

    link = {"link_mbit": link_mbit, "link_ms": link_ms}
    bench = RanksBench(layouts=names, repeats=repeats, samples=samples, say=say, **link)
    result = {"layouts": bench.measure(file)}
    if deltas:
        from tailrace.lab.benchmarks.live.weight_deltas import measure as measure_deltas

        result["delta_share"] = measure_deltas(resolve_model(file.application.args.engine.model), RATES, say)
    print_result(result, as_json)
