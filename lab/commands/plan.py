"""`tailrace plan`: which tensor, expert and data parallelism to run on some GPUs, by the simulator's step model."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from tailrace.app.errors import BadInput
from tailrace.app.files.output_file import OutputFile, OutputKind, check_apart
from tailrace.lab.commands.simulate import TRACE_CLUSTER, TRACES

MOST_DRAFTS = 16
"""Maximum number of draft tokens of a step that the bounds allow for: that of `goodput`, the default drafting policy.
"""


@click.command()
@click.option("--workload", default="moonlight", show_default=True,
              help="A paper's set-up by name, or a file: a set-up, or recorded rollouts (.jsonl, .gz).")  # fmt: skip
@click.option("--model", default=None, help="Model, by its name in the step model.  [default: the workload's]")
@click.option("--gpu", default=None, help="GPU, by its name in the step model.  [default: the workload's]")
@click.option("--gpus", type=click.IntRange(min=1), default=None, help="GPUs in all.  [default: the workload's]")
@click.option("--cluster", default=None,
              help=f"The set-up of a trace's model, GPUs and acceptance.  [default: {TRACE_CLUSTER}]")  # fmt: skip
@click.option("--tokenizer", default="demo", show_default=True, help="Tokenizer of a trace: a model's folder, or demo.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Draws of the workload.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Also write a serve.yaml for the best way.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(workload, model, gpu, gpus, cluster, tokenizer, seeds, out, as_json):
    """Say which parallelism to run: seconds of a step for every way to divide the GPUs into replicas.

    Seconds are lower bounds by work, by the longest sample and by memory. The sum of work and longest is reachable
    without knowledge of lengths, and the best way has the smallest sum. The file of --out has the best way that the
    service can run.
    """
    from tailrace.lab.simulator.planned_service import MARK, planned_file
    from tailrace.lab.simulator.priced_parallelism import best, own_size

    check_apart({"--out": out}, {"--workload": Path(workload)})
    file = OutputFile.of(out, "--out", OutputKind("a file of `tailrace plan --out`", (MARK.encode(),)))
    scenario, draws = _workload(workload, cluster, tokenizer, seeds)
    scenario = _changed(scenario, {"model": model, "gpu": gpu, "gpus": gpus})
    ways = _ways(scenario, draws)
    served = best(ways, served=True)
    if file is not None and served is None:
        raise BadInput(
            f"--out {out}: no way that fits on {scenario.gpus.value} {scenario.gpu.value} can be a replica of the "
            "service, which is one engine on one node; give GPUs with more memory, or leave --out out"
        )
    if file is not None:
        outside_tokens = max(group.outside_tokens for groups in draws for group in groups)
        file.write(planned_file(served, scenario, outside_tokens))
    own = own_size(ways, scenario.gpus_per_replica.value)
    chosen = {"best": best(ways), "served": served, "own": own if own and own.costs else None}
    result = _result(scenario, ways, chosen, len(draws))
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result, out)


def _workload(workload: str, cluster: str | None, tokenizer: str, seeds: int):
    """Returns the set-up, and the groups of one step for each draw. A trace is one draw, with its own prompts. Raises
    BadInput.
    """
    from tailrace.lab.commands.simulate import load_setup, trace_setup
    from tailrace.lab.simulator.scenario import Known

    if not workload.endswith(TRACES):
        if cluster is not None:
            raise BadInput("--cluster: for recorded rollouts only; give one by --workload FILE.jsonl, or leave it out")
        scenario = load_setup(workload)
        return scenario, [scenario.workload(seed).steps[0] for seed in range(seeds)]
    scenario = load_setup(cluster or TRACE_CLUSTER, "--cluster")
    found = trace_setup(Path(workload), scenario, 1.0, tokenizer, "table").setup.workload
    prompt_tokens = Known(value=max(group.prompt_tokens for group in found.steps[0]), source="the longest of the trace")
    return scenario.model_copy(update={"name": found.name, "prompt_tokens": prompt_tokens}), [found.steps[0]]


def _changed(scenario, given: dict):
    """Returns the set-up with the values of the options. Raises BadInput for names that are not in the step model."""
    from tailrace.lab.simulator.hardware import GPUS, MODELS, nearest
    from tailrace.lab.simulator.scenario import Known

    for option, table in (("model", MODELS), ("gpu", GPUS)):
        if given[option] is not None and given[option] not in table:
            raise BadInput(f"--{option} {given[option]}: not in the step model; {nearest(table, given[option])}")
    known = {key: Known(value=value, assumed=f"given by --{key}") for key, value in given.items() if value is not None}
    return scenario.model_copy(update=known)


def _ways(scenario, draws: Sequence):
    from rich.console import Console
    from rich.progress import Progress

    from tailrace.lab.simulator.parallelism import parallelisms_of
    from tailrace.lab.simulator.priced_parallelism import priced

    model, gpu, acceptance = scenario.model.value, scenario.gpu.value, scenario.drafting()[0].acceptance
    divided = list(parallelisms_of(model, scenario.gpus.value, scenario.gpus_per_node.value))
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        return [priced(gpu, model, each, draws, acceptance, MOST_DRAFTS) for each in bar.track(divided)]


def _result(scenario, ways: Sequence, chosen: dict, seeds: int) -> dict:
    """Returns every way, and the chosen ones. `best`: the way with the smallest sum. `served`: the best way that the
    service can run. `own`: the set-up's way. A chosen way is None if none fits.
    """
    names = ("model", "gpu", "gpus")
    return {
        "workload": scenario.name,
        **{name: getattr(scenario, name).value for name in names},
        "seeds": seeds,
        "ways": [_figures(one) for one in ways],
        **{name: one and _figures(one) for name, one in chosen.items()},
    }


def _figures(one) -> dict:
    parallelism, costs = one.parallelism, {} if one.costs is None else asdict(one.costs)
    return {
        "tensor": parallelism.tensor,
        "expert": parallelism.expert,
        "data": parallelism.data,
        "replicas": parallelism.replicas,
        "gpus_per_replica": parallelism.gpus_per_replica,
        "served": one.served,
        "problem": one.problem or None,
        **{key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in costs.items()},
    }


HEADS = ("TP", "EP", "DP", "samples", "at once", "GB", "work", "longest", "memory", "sum")

NOTE = (
    "TP, EP, DP: GPUs that share a layer, GPUs that share the experts, copies of the attention. Samples a replica, and "
    "those of them at once; GB of weights a GPU; seconds of a step. Sum: work + longest."
)


def _print(result: dict, out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from tailrace.lab.simulator.report import number

    console = Console()
    table = Table(*HEADS, title=f"{result['workload']}: {result['model']} on {result['gpus']} {result['gpu']}")
    keys = ("samples", "running", "weights_gb", "work_s", "longest_s", "memory_s", "total_s")
    for one in result["ways"]:
        sizes = (str(one[key]) for key in ("tensor", "expert", "data"))
        table.add_row(*sizes, *(number(one.get(key)) for key in keys))
    console.print(table)
    console.print(NOTE, highlight=False)
    for one in (one for one in result["ways"] if one["problem"]):
        console.print(f"TP {one['tensor']}, EP {one['expert']}: {one['problem']}", highlight=False)
    own = result["own"]
    console.print(f"the least sum: {_said(result['best'], own)}", highlight=False)
    if result["served"] != result["best"]:
        console.print(
            f"the least that a replica of the service can be: {_said(result['served'], own)}", highlight=False
        )
    if out is not None:
        console.print(f"written to {out}: set `model` there to your folder", highlight=False, markup=False)


def _said(one: dict | None, own: dict | None) -> str:
    """Returns a way in words, with its gain over the set-up's own way."""
    if one is None:
        return "none fits"
    said = f"TP {one['tensor']}, EP {one['expert']}: {one['replicas']} replica(s) of {one['gpus_per_replica']} GPU(s)"
    gain = (
        f", {own['total_s'] / one['total_s']:.2f} times as fast as the set-up's own" if own not in (None, one) else ""
    )
    return f"{said}, {one['samples']} samples each{gain}"
