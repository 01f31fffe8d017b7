"""A paper's set-up as a file: every figure with its source, or the reason why it is assumed.

Invariant: what loads has no unknown key, and each figure has either `source` or `assumed`, so that a command can print
the basis of a result (`notes`). The files in `scenarios/` are those of the four papers; a user's own are read the
same way. Errors are ValueError, one line with file and key. Called by the simulate command and by tests.
"""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tailrace.app.strict_yaml import read_yaml
from tailrace.lab.simulator.acceptance import AcceptanceTable, Measured, ModelledMethod
from tailrace.lab.simulator.laws import Law, draw, draw_steps, solve, with_gaps
from tailrace.lab.simulator.types import Workload, WorkloadGroup

FOLDER = Path(__file__).parent / "scenarios"
EARLIER_PROMPTS, EARLIER_SEED = 256, 1 << 32
"""Prompts of the step before, from other draws, whose lengths a service knows: a law needs no more."""

T = TypeVar("T")
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Rows = tuple[tuple[NotNegative, NotNegative, Positive], ...]


class ScenarioModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def notes(self) -> list[tuple[str, object, str, str]]:
        """Returns (dotted key, value, `source` or `assumed`, text) of every figure."""
        return list(_notes("", self))


class Known(ScenarioModel, Generic[T]):
    """A figure with where it is published (paper, section or table), or why this one is assumed."""

    value: T
    source: str | None = None
    assumed: str | None = None

    @model_validator(mode="after")
    def _one_reason(self):
        if bool(self.source) == bool(self.assumed):
            raise ValueError("say either where it is published (source) or why it is assumed (assumed)")
        return self

    def scaled(self, value: T, share: float) -> "Known[T]":
        reason = {key: f"{text}; scaled by {share:g}" for key in ("source", "assumed") if (text := getattr(self, key))}
        return type(self)(value=value, **reason)


class LengthFigures(ScenarioModel):
    """Known figures of lengths; two of mean, spread and quantiles {share: tokens} fix the law (see laws.Law)."""

    mean_tokens: Known[Positive] | None = None
    spread: Known[Positive] | None = None
    quantiles: Known[dict[Share, Positive]] | None = None
    at_cap: Known[Share] | None = None
    within: Known[Share]
    persist: Known[Share]
    drift: Known[float] | None = None
    predictability_spread: Known[NotNegative]


class AcceptanceFigures(ScenarioModel):
    """Rows of (mates, past answers, tokens per verification) at `drafts` drafts.

    `branches`: rows of (paths verified at once, tokens per verification), listed as evidence and not simulated.
    """

    drafts: Known[Count]
    table: Known[Rows]
    branches: Known[tuple[tuple[Count, Positive], ...]] | None = None

    def chances(self) -> AcceptanceTable:
        table = tuple(Measured(*row) for row in self.table.value)
        return AcceptanceTable(table, self.drafts.value)


class MethodFigures(ScenarioModel):
    """A draft model, besides the index: a draft token for each of b samples takes base_s + token_s * b."""

    acceptance: AcceptanceFigures
    base_s: Known[NotNegative]
    token_s: Known[NotNegative]


class TurnFigures(ScenarioModel):
    """Turns of a sample, with a tool between each two: its seconds and its tokens are log-normal, of these means."""

    turns: Known[Count]
    tool_s: Known[NotNegative]
    outside_tokens: Known[NotNegative]
    spread: Known[NotNegative]


class Scenario(ScenarioModel):
    """One paper's workload on its cluster. `model` and `gpu` are names in hardware's tables; `claims` are the paper's
    results, each a range, as ratios to its baseline unless the key says otherwise. `training_gpus`: of rollout and
    training together, where `gpus` is those of rollout alone."""

    name: str
    about: str
    model: Known[str]
    gpu: Known[str]
    gpus: Known[Count]
    training_gpus: Known[Count] | None = None
    gpus_per_replica: Known[Count]
    gpus_per_node: Known[Count]
    prompts: Known[Count]
    samples: Known[Count]
    prompt_tokens: Known[Count]
    max_tokens: Known[Count]
    chunk_tokens: Known[Count]
    epochs: Known[Annotated[int, Field(ge=0)]]
    lengths: LengthFigures
    acceptance: AcceptanceFigures
    methods: dict[str, MethodFigures] = {}
    claims: dict[str, Known[tuple[float, float]]] = {}
    turns: TurnFigures | None = None

    @model_validator(mode="after")
    def _has_a_law(self):
        self.law()
        self.drafting()
        return self

    @property
    def replicas(self) -> int:
        return max(self.gpus.value // self.gpus_per_replica.value, 1)

    @property
    def replicas_per_node(self) -> int:
        return max(self.gpus_per_node.value // self.gpus_per_replica.value, 1)

    def law(self) -> Law:
        figures = {key: known.value for key in LengthFigures.model_fields if (known := getattr(self.lengths, key))}
        two = {key: figures.get(key) for key in ("mean_tokens", "spread", "quantiles")}
        at_cap, most = figures.get("at_cap", 0.0), self.max_tokens.value
        median_tokens, spread = solve(most, at_cap=at_cap, **two)
        return Law(
            median_tokens=median_tokens,
            spread=spread,
            max_tokens=most,
            within=figures["within"],
            persist=figures["persist"],
            at_cap=at_cap,
            predictability_spread=figures["predictability_spread"],
        )

    def drafting(self) -> tuple[ModelledMethod, ...]:
        """Returns the ways to draft, first the index of own sample, mates and history."""
        others = (
            ModelledMethod(name, method.acceptance.chances(), method.base_s.value, method.token_s.value)
            for name, method in self.methods.items()
        )
        return ModelledMethod("index", self.acceptance.chances()), *others

    def workload(self, seed: int, steps: int = 1) -> Workload:
        """Returns several steps over the same prompts, each an epoch after the last and knowing the `epochs` before
        it.
        """
        drift = self.lengths.drift.value if self.lengths.drift else 0.0
        counts = self.prompts.value, self.samples.value, steps
        drawn = draw_steps(self.law(), *counts, drift, seed, self.epochs.value, self.prompt_tokens.value)
        if (turns := self.turns) is not None:
            figures = turns.turns.value, turns.tool_s.value, turns.spread.value, turns.outside_tokens.value
            drawn = tuple(with_gaps(groups, step, *figures, seed) for step, groups in enumerate(drawn))
        seen = draw(self.law(), EARLIER_PROMPTS, counts[1], self.epochs.value, EARLIER_SEED + seed)
        return Workload(self.name, self.max_tokens.value, drawn, seen)

    def whole(self) -> "Scenario":
        """Returns the same with the GPUs of training among those of rollout."""
        return self if self.training_gpus is None else self.model_copy(update={"gpus": self.training_gpus})

    def scaled(self, share: float) -> "Scenario":
        """Returns the same on `share` of the replicas, a replica or more, with as many prompts for each."""
        if not 0 < share <= 1:
            raise ValueError(f"a scenario is scaled by a share of 0 to 1, not {share}")
        replicas = max(round(self.replicas * share), 1)
        prompts = max(round(self.prompts.value * replicas / self.replicas), 1)
        gpus = self.gpus.scaled(replicas * self.gpus_per_replica.value, share)
        return self.model_copy(update={"gpus": gpus, "prompts": self.prompts.scaled(prompts, share)})


def _notes(key: str, item: object) -> Iterator[tuple[str, object, str, str]]:
    if isinstance(item, Known):
        kind = "source" if item.source else "assumed"
        yield key, item.value, kind, getattr(item, kind)
    elif isinstance(item, BaseModel | Mapping):
        for name, part in item.items() if isinstance(item, Mapping) else item:
            yield from _notes(f"{key}.{name}".lstrip("."), part)


def scenario_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_scenario(name_or_path: str) -> Scenario:
    """Loads a scenario of this project by name, or any by the path of its file. Raises ValueError in one line."""
    path = FOLDER / f"{name_or_path}.yaml" if name_or_path in scenario_names() else Path(name_or_path)
    if not path.is_file():
        near = get_close_matches(name_or_path, scenario_names(), n=3) or scenario_names()
        raise ValueError(f"{name_or_path}: no such scenario or file; did you mean {', '.join(near)}?")
    try:
        data = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a scenario is a mapping of keys")
    try:
        return Scenario.model_validate({"name": path.stem, **data})
    except ValidationError as error:
        raise ValueError(f"{path}: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    """Returns the first complaint as one line: dotted key, the fault, and for an unknown key the nearest known ones."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "file"
    if first["type"] == "extra_forbidden":
        models = (Scenario, LengthFigures, AcceptanceFigures, MethodFigures, TurnFigures, Known)
        near = get_close_matches(str(first["loc"][-1]), sorted({n for model in models for n in model.model_fields}))
        return f"{key}: unknown key; {'did you mean ' + ', '.join(near) + '?' if near else 'remove it'}"
    if first["type"] == "value_error":
        return f"{key}: {first['ctx']['error']}"
    return f"{key}: {first['msg']}"


def trace_workload(
    name: str,
    lengths: Mapping[str, Sequence[Sequence[int]]],
    prompt_tokens: Mapping[str, int],
    max_tokens: int,
    samples: int | None = None,
) -> Workload:
    """Returns one step over recorded lengths, `{prompt: [[of an epoch], ...]}`, oldest epoch first; the last one is
    rolled out.

    At most `samples` answers of each epoch are taken, and max_tokens ends them. Raises ValueError without an answer.
    """
    groups = []
    for prompt, epochs in lengths.items():
        rows = [tuple(min(max(tokens, 1), max_tokens) for tokens in epoch[:samples]) for epoch in epochs]
        if not rows or not rows[-1]:
            raise ValueError(f"{name}: prompt {prompt} has no answer to roll out")
        groups.append(WorkloadGroup(prompt, prompt_tokens[prompt], rows[-1], tuple(rows[-2::-1])))
    return Workload(name, max_tokens, (tuple(groups),))
