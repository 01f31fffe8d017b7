"""`tailrace verify`: exit 0 if scheduling changed no token, 1 with sample and position if it changed one.

At exactness `law` tokens that differ are counted, and only other differences lead to exit 1.
"""

import json
from pathlib import Path

import click
from pydantic import ValidationError

from tailrace.app.allow_code import allow_code_option
from tailrace.app.config import DEFAULT_CONFIG, ServeFile, load_config, with_engine
from tailrace.app.errors import BadInput, Failed
from tailrace.app.files.prompts import read_prompts
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.lab.demo import PROMPTS


@click.command()
@click.option("--prompts", type=click.Path(path_type=Path), default=PROMPTS, show_default="the demo's")
@click.option("--samples", type=click.IntRange(min=1), default=4, show_default=True, help="Samples per prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Per sample.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@allow_code_option
@click.option(
    "--kv-on-update",
    type=click.Choice(["fresh", "keep", "finish"]),
    default="fresh",
    show_default=True,
    help="keep leaves the weights version out of the keys of samples under way: the update check must fail. "
    "finish: each sample must have one version to its end, and that version's tokens.",
)
@click.option(
    "--only", type=click.Choice(["runs", "update"]), default=None, show_default="both", help="One half of the check."
)
@click.option("--runs", "names", multiple=True, metavar="NAME",
              help="Only the reference and this run; may be repeated.")  # fmt: skip
@click.option("--exactness", type=click.Choice(["bits", "law"]), default=None, show_default="as configured",
              help="law: count the tokens that differ, instead of failing.")  # fmt: skip
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default=None,
              show_default="as configured", help="Of weights and KV.")  # fmt: skip
@click.option("--train", is_flag=True, help="The certificate of learning instead: whole training steps, to the bit.")
@click.option("--steps", type=click.IntRange(min=4), default=6, show_default=True, help="Of --train.")
@click.option("--corrupt", "corrupted", is_flag=True,
              help="Change one token of the last run, or the order of gradients: the check must fail.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The certificate as one JSON object, the last line of stdout.")
def command(prompts, samples, max_tokens, seed, config, kv_on_update, only, names, exactness, dtype, train, steps,
            corrupted, as_json):  # fmt: skip
    """Show that tokens do not depend on chunks, replicas, pool, batch, drafts or a crash, and that no stale KV is read.

    The whole check takes about half an hour on two cores, mainly for decoding. Fewer or shorter samples take less.
    """
    _refuse_options_of_the_other_certificate(click.get_current_context(), train)
    file = _at_level(load_config(config), exactness, dtype)
    exactness = file.application.args.engine.exactness

    def say(text: str) -> None:
        click.echo(text, err=True)

    if train:
        from tailrace.lab.commands.verify_train import verify_train

        verify_train(file, steps, corrupted, as_json, say)
        return
    sampling = {"temperature": 1.0}
    wanted = read_prompts(prompts, {"samples": samples, "max_tokens": max_tokens, "sampling": sampling})
    from tailrace.deployments.messages.rollout import RolloutBatch
    from tailrace.lab.verification.tokens import certificate, corrupt, roll_all

    runs = _chosen(names, file.application.args.engine)
    wrong = _to_corrupt(runs, only, exactness) if corrupted else None
    batch = RolloutBatch(batch_id="verify", groups=wanted, seed=seed)

    result = {"exactness": exactness, "identical": True, "holds": True, "runs": []}
    if only != "update":
        rolled = roll_all(file, batch, runs, say)
        if wrong is not None:
            rolled[wrong]["groups"] = corrupt(rolled[wrong]["groups"])
        result = certificate(rolled, file.application.args.engine.close_call_tolerance, exactness)
    if only != "runs":
        update = _update(file, batch, kv_on_update, say)
        faults = update["old_kv_hit_tokens"] or update["unchecked"] or update.get("mixed")
        faults = faults or not update.get("changed", 1)
        update["holds"] = update["identical"] or (exactness == "law" and update["samples"] > 0 and not faults)
        both = {key: result[key] and update[key] for key in ("identical", "holds")}
        result |= {"update": update} | both
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)
    _fail_where_it_differs(result)


OF_TOKENS = ("prompts", "samples", "max_tokens", "seed", "kv_on_update", "only", "names", "exactness", "dtype")
"""Names of options that only the certificate of tokens has."""


def _refuse_options_of_the_other_certificate(context: click.Context, train: bool) -> None:
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name) is not click.core.ParameterSource.DEFAULT
        if given and parameter.name in (OF_TOKENS if train else ("steps",)):
            fault = "is not an option of --train, whose sizes are fixed" if train else "is an option of --train alone"
            raise BadInput(f"{parameter.opts[0]}: {fault}; leave it out")


def _at_level(file: ServeFile, exactness: str | None, dtype: str | None) -> ServeFile:
    """Returns the configuration with the given exactness and dtype. Raises BadInput if the engine cannot have them."""
    changes = {name: value for name, value in (("exactness", exactness), ("dtype", dtype)) if value is not None}
    engine = file.application.args.engine
    try:
        EngineConfig.model_validate(engine.model_dump(exclude={"draft"}) | {"draft": engine.draft} | changes)
    except ValidationError as error:
        raise BadInput(f"engine: {error.errors()[0]['msg']}") from error
    return with_engine(file, changes) if changes else file


def _chosen(names: tuple[str, ...], engine: EngineConfig) -> list:
    """Returns the runs with these names, after their references; without names all runs that the engine can have.
    Raises BadInput for a run that is unknown or that the engine cannot have.
    """
    from tailrace.lab.verification.runs import RUNS

    known = [run.name for run in RUNS]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise BadInput(f"--runs {unknown}: known: {', '.join(known)}")
    refused = {run.name: reason for run in RUNS if (reason := _unfit(run, engine)) is not None}
    for name in (name for name in names if name in refused):
        raise BadInput(f"--runs {name}: {refused[name]}; leave it out")
    wanted = [run for run in RUNS if run.name in names or not (names or run.name in refused)]
    kinds = {RUNS[0].kind, *(run.kind for run in wanted)}
    references = [next(run for run in RUNS if run.kind == kind) for kind in kinds]
    return [run for run in RUNS if run in wanted or run in references]


def _unfit(run, engine: EngineConfig) -> str | None:
    """Returns why the engine cannot have a run, or None."""
    if engine.exactness == "law" and ("redraw_close_calls", True) in run.service.engine:
        return "redraws need exactness bits"
    return "bits in bfloat16 on a CPU takes no adapters" if engine.has_windows and run.adapted else None


def _to_corrupt(runs: list, only: str | None, exactness: str) -> str:
    """Returns the name of the run of which --corrupt changes a token: the last one that is compared with another.
    Raises BadInput if the check could not find that.
    """
    compared = [run.name for place, run in enumerate(runs) if run.kind in [before.kind for before in runs[:place]]]
    if only == "update" or not compared:
        raise BadInput("--corrupt: changes a token of a run that is compared with another, and there is none here")
    if exactness == "law":
        raise BadInput("--corrupt: at exactness law a token that differs is counted and does not fail; give bits")
    return compared[-1]


def _update(file, batch, kv_on_update, say) -> dict:
    """Returns the update certificate, over a change to weights that are made from the configured ones."""
    import tempfile

    from tailrace.app.model import perturbed, resolve_model
    from tailrace.lab.verification import finished
    from tailrace.lab.verification.weights_update import measure

    with tempfile.TemporaryDirectory(prefix="tailrace-weights-") as folder:
        say("making other weights")
        weights = perturbed(resolve_model(file.application.args.engine.model), Path(folder) / "other")
        if kv_on_update == "finish":
            return finished.measure(file, batch, weights, say)
        return measure(file, batch, weights, kv_on_update, say)


def _fail_where_it_differs(result: dict) -> None:
    wrong = next((run for run in result["runs"] if not run["holds"]), None)
    if wrong is not None:
        at = wrong["first_difference"]
        raise Failed(
            f"run {wrong['name']} differs: prompt {at['prompt_id']!r} sample {at['sample_index']} "
            f"position {at['position']}: {at['what']}"
        )
    update = result.get("update")
    if update is not None and not update["holds"]:
        if mixed := update.get("mixed"):
            raise Failed(f"{mixed} samples did not end under the weights that they began with")
        if unchecked := update["unchecked"]:
            raise Failed(f"{unchecked} samples of the update could not be checked: their tokens or spans are missing")
        if not update.get("changed", 1):
            raise Failed("no sample has other tokens under the new weights: were they loaded?")
        at = update["first_difference"]
        where = f"; first at prompt {at['prompt_id']!r}, position {at['position']}" if at else ""
        raise Failed(
            f"after the update {update['samples']} samples continued, {update['old_kv_hit_tokens']} tokens of old KV "
            f"were read, and tokens {'differ' if at else 'agree'}{where}"
        )


COLUMNS = (
    "run", "seconds", "drafting", "identical", "flips", "chunked", "moved", "pulled", "raced", "drafted", "by_model",
    "accepted", "noise", "close", "redrawn", "note",
)  # fmt: skip
SHOWN_KEYS = (
    "name", "seconds", "drafting", "identical", "flips", "chunked_share", "moved_samples", "pulled_tokens", "races",
    "drafted_tokens", "model_tokens", "accepted_share",
)  # fmt: skip
"""Columns of the table, and the keys of a run that fill the first of them."""


def _print(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    from tailrace.lab.verification.closeness import sentences

    if update := result.get("update"):
        Console().print("update:", ", ".join(f"{key} {value}" for key, value in update.items()))
    if not result["runs"]:
        return
    table = Table(title=f"{result['samples']} samples, {result['tokens']} tokens")
    for column in COLUMNS:
        table.add_column(column.replace("_", " "))
    for run in result["runs"]:
        cells = [run[key] for key in SHOWN_KEYS]
        sure = (f"{run['max_logprob_difference']:.1e}", str(run["close_calls"]), str(run["redraws"]))
        table.add_row(*map(str, cells), *sure, run["note"] or "")
    Console().print(table)
    Console().print("\n".join(sentences(result)), highlight=False)
