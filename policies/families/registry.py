"""The registry of policies. `Policies` holds one member of every family, as `serve.yaml` names them under `policies`.

A member is named by `type`. An installed package may add members by an entry point `FAMILY.NAME` of the group
`tailrace.policies`. A user's own class is named by dotted path, `type: "my_pkg.mine:MyOrdering"` with `args: {...}`;
its package must be allowed (`allowed_code`). An unknown name or knob is an error that gives the nearest ones.
"""

from difflib import get_close_matches
from importlib import import_module, metadata
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
    TypeAdapter,
    ValidationError,
)

from tailrace.policies.families.allowed_code import ENTRY_POINTS, check_allowed
from tailrace.policies.families.chunking import Chunking, ChunkingPolicy, FixedChunks, at_blocks
from tailrace.policies.families.draft_models import AsConfigured, DraftModels, DraftModelsPolicy, Planned
from tailrace.policies.families.drafting import Drafting, DraftingPolicy
from tailrace.policies.families.fairness import Fairness, FairnessPolicy, FairShares
from tailrace.policies.families.goodput import Goodput
from tailrace.policies.families.histo_pipe import HistoPipe
from tailrace.policies.families.kv_on_update import Fresh, KvOnUpdate, KvOnUpdatePolicy
from tailrace.policies.families.lanes import AutoLanes, Lanes, LanesPolicy
from tailrace.policies.families.lengths import Lengths, LengthsPolicy, MaxFinished
from tailrace.policies.families.ordering import BuiltInOrdering, Ordering, Seer
from tailrace.policies.families.placement import LeastKv, Placement, PlacementPolicy
from tailrace.policies.families.prefetch import NextUp, Prefetching, PrefetchPolicy
from tailrace.policies.families.racing import NoRacing as NoRaces
from tailrace.policies.families.racing import Racing, RacingPolicy
from tailrace.policies.families.tail import Hold, Tail, TailPolicy
from tailrace.policies.families.trajectories import ActiveTrajectories, AllAtOnce, TrajectoriesPolicy
from tailrace.policies.protocol.file_keys import without_constants

OrderingPolicy = Annotated[BuiltInOrdering | HistoPipe, Field(discriminator="type")]

FAMILIES = {
    "ordering": (OrderingPolicy, Ordering),
    "placement": (PlacementPolicy, Placement),
    "chunking": (ChunkingPolicy, Chunking),
    "kv_on_update": (KvOnUpdatePolicy, KvOnUpdate),
    "prefetch": (PrefetchPolicy, Prefetching),
    "lengths": (LengthsPolicy, Lengths),
    "drafting": (DraftingPolicy, Drafting),
    "draft_models": (DraftModelsPolicy, DraftModels),
    "tail": (TailPolicy, Tail),
    "racing": (RacingPolicy, Racing),
    "fairness": (FairnessPolicy, Fairness),
    "lanes": (LanesPolicy, Lanes),
    "trajectories": (TrajectoriesPolicy, ActiveTrajectories),
}


def installed(family: str) -> dict[str, str]:
    """Returns the policies that installed packages add to a family: name -> dotted path `module:Class`, in order of
    names.
    """
    found = metadata.entry_points(group=ENTRY_POINTS)
    prefix = f"{family}."
    return {e.name.removeprefix(prefix): e.value for e in sorted(found) if e.name.startswith(prefix)}


def members(family: str) -> dict[str, type[BaseModel]]:
    """Returns the built-in policies of a family by their `type`."""
    union = get_args(FAMILIES[family][0])[0]
    classes = get_args(union) or (union,)
    return {cls.model_fields["type"].default: cls for cls in classes}


def name_of(policy: BaseModel) -> str:
    """Returns the `type` of a policy: its name, or the dotted path of a user's own."""
    cls = type(policy)
    if any(cls in members(family).values() for family in FAMILIES):
        return policy.type
    return f"{cls.__module__}:{cls.__qualname__}"


def load_policy(family: str, value: Any) -> BaseModel:
    """Makes a policy object from its name, its mapping, or itself. Raises ValueError with one line on bad input."""
    if isinstance(value, BaseModel):
        return _checked(family, value)
    spec = value if isinstance(value, dict) else {"type": value}
    if spec.get("type") is False:  # YAML 1.1, which Serve reads, takes `off` for false
        spec = spec | {"type": "off"}
    if not isinstance(spec, dict) or not isinstance(spec.get("type"), str):
        raise ValueError(f"{family}: give a name or a mapping with `type`, not {value!r}")
    if ":" in spec["type"]:
        return _user_policy(family, spec)
    known = members(family)
    if spec["type"] in known:
        return _built(known[spec["type"]], spec)
    others = installed(family)
    if spec["type"] in others:
        knobs = {key: value for key, value in spec.items() if key != "type"}
        return _user_policy(family, {"type": others[spec["type"]], "args": knobs})
    near = get_close_matches(spec["type"], [*known, *others], cutoff=0.4)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise ValueError(f"unknown {family} {spec['type']!r}; {hint}known: {', '.join([*known, *others])}")


def _user_policy(family: str, spec: dict) -> BaseModel:
    module, _, name = spec["type"].partition(":")
    extra = set(spec) - {"type", "args"}
    if extra:
        raise ValueError(f"{family} {spec['type']}: unknown key {min(extra)!r}; its knobs belong under `args`")
    try:
        check_allowed(spec["type"])
    except ValueError as error:
        raise ValueError(f"{family} {error}") from error
    try:
        cls = getattr(import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{family} {spec['type']!r} cannot be imported: {error}") from error
    if not isinstance(cls, type) or not issubclass(cls, BaseModel):
        raise ValueError(f"{family} {spec['type']!r} is not a pydantic model")
    return _checked(family, _built(cls, spec.get("args", {})))


def _built(cls: type[BaseModel], knobs: dict) -> BaseModel:
    try:
        return TypeAdapter(cls).validate_python(knobs)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = unknown_key(cls, first["loc"]) if first["type"] == "extra_forbidden" else first["msg"]
        raise ValueError(f"{cls.__name__}.{place}: {message}") from error


def unknown_key(model: type[BaseModel], place: tuple[int | str, ...]) -> str:
    """Returns the error about a key that a model, or a model inside it, does not have, with the nearest key it has."""
    for part in place[:-1]:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        model = _model_in(field.annotation) or model if field else model
    near = get_close_matches(str(place[-1]), model.model_fields, n=1)
    return f"unknown key; did you mean {near[0]}?" if near else "unknown key; remove it or correct its spelling"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the first pydantic model in a type such as `Model | None` or `tuple[Model, ...]`, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)


def _checked(family: str, policy: Any) -> BaseModel:
    protocol = FAMILIES[family][1]
    if not isinstance(policy, BaseModel) or not isinstance(policy, protocol):
        wanted = sorted(name for name in {*dir(protocol), *protocol.__annotations__} if not name.startswith("_"))
        name = type(policy).__name__
        raise ValueError(f"{name} is no {family} policy: it must be a pydantic model with {', '.join(wanted)}")
    return policy


def dump_policy(policy: BaseModel, info: SerializationInfo) -> dict:
    """Returns the mapping from which `load_policy` makes the same policy."""
    name, knobs = name_of(policy), policy.model_dump(mode=info.mode)
    return {"type": name, "args": knobs} if ":" in name else knobs


def _member(family: str) -> Any:
    return Annotated[BaseModel, BeforeValidator(lambda v: load_policy(family, v)), PlainSerializer(dump_policy)]


class Policies(BaseModel):
    """One member of every family. The defaults are Seer's (divided rollout, Algorithm 1, `LeastKv`) and exact KV."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=without_constants)
    file_keys: ClassVar[tuple[str, ...]] = (
        "ordering",
        "placement",
        "chunking",
        "kv_on_update",
        "lengths",
        "drafting",
        "draft_models",
        "tail",
        "racing",
        "lanes",
        "trajectories",
    )

    ordering: _member("ordering") = Seer()
    placement: _member("placement") = LeastKv()
    chunking: _member("chunking") = FixedChunks()
    kv_on_update: _member("kv_on_update") = Fresh()
    prefetch: _member("prefetch") = NextUp()
    lengths: _member("lengths") = MaxFinished()
    drafting: _member("drafting") = Goodput()
    draft_models: _member("draft_models") = AsConfigured()
    tail: _member("tail") = Hold()
    racing: _member("racing") = NoRaces()
    fairness: _member("fairness") = FairShares()
    lanes: _member("lanes") = AutoLanes()
    trajectories: _member("trajectories") = AllAtOnce()

    def sized(self, block_tokens: int, drafters: int) -> "Policies":
        """Returns the same for engines with KV blocks of this size beside this many draft models (0: none).

        Policies of a user's own, and sizes that are set, stay.
        """
        chunking, models = at_blocks(self.chunking, block_tokens), self.draft_models
        if isinstance(models, Planned) and models.replicas == 1 and drafters:
            models = models.model_copy(update={"replicas": drafters})
        return self.model_copy(update={"chunking": chunking, "draft_models": models})
