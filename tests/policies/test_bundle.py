"""The registry of policies: names, knobs, dotted paths, and errors of one line that say what to write instead."""

from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError
from user_policies import (
    AlwaysTwo,
    Doubling,
    HalfADraft,
    HalfTheQueue,
    Halving,
    HighestId,
    KeepYoung,
    LargestShare,
    LastComeFirst,
    NobodyTwice,
    OneForEight,
    TakingTurns,
    TwoAtOnce,
)

from tailrace.policies.families.ordering import Fcfs, Seer
from tailrace.policies.families.registry import FAMILIES, Policies, installed, load_policy, members, name_of

BUILT_IN = {
    "ordering": ["fcfs", "group_static", "seer", "remaining_first", "oracle_longest_first", "histo_pipe"],
    "placement": ["least_kv", "round_robin", "first_fit", "pinned", "cost_aware"],
    "chunking": ["fixed"],
    "kv_on_update": ["fresh", "keep", "finish"],
    "prefetch": ["off", "next_up"],
    "lengths": ["max_finished", "history_quantile", "length_class", "shrunk", "belief"],
    "drafting": ["off", "fixed", "aimd", "length_class", "closed_form", "concurrency", "goodput"],
    "draft_models": ["as_configured", "planned"],
    "tail": ["hold", "release", "consolidate", "draft", "threshold", "auto"],
    "racing": ["off", "fastest_of_n"],
    "fairness": ["one_queue", "fair_shares"],
    "lanes": ["none", "auto", "clairvoyant"],
    "trajectories": ["all_at_once", "by_kv"],
}
USERS_OWN = {
    "ordering": {"type": "user_policies:LastComeFirst", "args": {"spread": 2}},
    "placement": {"type": "user_policies:HighestId", "args": {}},
    "chunking": {"type": "user_policies:Halving", "args": {}},
    "kv_on_update": {"type": "user_policies:KeepYoung", "args": {"updates": 2}},
    "prefetch": {"type": "user_policies:HalfTheQueue", "args": {}},
    "lengths": {"type": "user_policies:Doubling", "args": {}},
    "drafting": {"type": "user_policies:HalfADraft", "args": {"max_draft_tokens": 8}},
    "draft_models": {"type": "user_policies:AlwaysTwo", "args": {"acceptance": 0.25}},
    "tail": {"type": "user_policies:OneForEight", "args": {"samples": 8}},
    "racing": {"type": "user_policies:NobodyTwice", "args": {"room": 1}},
    "fairness": {"type": "user_policies:LargestShare", "args": {"apart": True}},
    "lanes": {"type": "user_policies:TakingTurns", "args": {"every": 0.5}},
    "trajectories": {"type": "user_policies:TwoAtOnce", "args": {"most": 3}},
}
EVERY = [(family, name) for family, names in BUILT_IN.items() for name in names]


def error_of(**policies) -> str:
    """The one line that a wrong configuration gives."""
    with pytest.raises(ValidationError) as caught:
        Policies(**policies)
    (error,) = caught.value.errors()
    assert "\n" not in error["msg"]
    return error["msg"]


def test_the_registry_is_complete():
    assert {family: list(members(family)) for family in FAMILIES} == BUILT_IN


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_a_member_goes_by_its_name_alone_by_a_mapping_and_as_itself(family, name):
    cls = members(family)[name]
    for value in (name, {"type": name}, cls()):
        policy = load_policy(family, value)
        assert type(policy) is cls and name_of(policy) == name
        assert getattr(Policies(**{family: value}), family) == cls()


def is_model(kind) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@pytest.mark.parametrize(("family", "name"), EVERY)
def test_every_knob_is_described_bounded_and_frozen(family, name):
    kinds = [members(family)[name]]
    for cls in kinds:
        assert cls.model_config["frozen"] and cls.model_config["extra"] == "forbid" and cls.__doc__
        for knob, field in cls.model_fields.items():
            inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if is_model(kind)]
            kinds += inner
            assert knob == "type" or (field.description and (field.metadata or inner)), knob


@pytest.mark.parametrize(("family", "name"), EVERY)
@pytest.mark.parametrize("mode", ["python", "json"])
def test_a_dump_builds_the_same_policies(family, name, mode):
    policies = Policies(**{family: name})
    assert Policies(**policies.model_dump(mode=mode)) == policies
    assert Policies.model_validate_json(policies.model_dump_json()) == policies


def test_a_dump_of_the_users_own_policies_builds_them_again():
    policies = Policies(**USERS_OWN)
    assert policies.model_dump() == USERS_OWN
    assert Policies(**policies.model_dump()) == policies
    assert [getattr(policies, family) for family in FAMILIES] == [
        LastComeFirst(spread=2), HighestId(), Halving(), KeepYoung(updates=2), HalfTheQueue(), Doubling(), HalfADraft(),
        AlwaysTwo(acceptance=0.25), OneForEight(), NobodyTwice(), LargestShare(), TakingTurns(), TwoAtOnce(most=3),
    ]  # fmt: skip


def test_a_subclass_of_a_member_is_the_users_own():
    assert ":" in name_of(Subclass()) and name_of(Subclass()) != "fcfs"


class Subclass(Fcfs):
    """Inherits its base's `type`, and still is another policy."""


def test_the_defaults_are_seer_s_and_lanes_where_they_are_expected_to_gain():
    policies = Policies()
    names = [name_of(getattr(policies, family)) for family in FAMILIES]
    assert names == [
        "seer",
        "least_kv",
        "fixed",
        "fresh",
        "next_up",
        "max_finished",
        "goodput",
        "as_configured",
        "hold",
        "off",
        "fair_shares",
        "auto",
        "all_at_once",
    ] and policies.ordering == Seer(explore=0.1, seed=0)


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({"ordering": "sear"}, "unknown ordering 'sear'; nearest: seer; known: fcfs, group_static, seer"),
        ({"placement": {"type": "least-kv"}}, "nearest: least_kv"),
        ({"placement": "zzz"}, "unknown placement 'zzz'; known: least_kv"),
        ({"ordering": {"type": "seer", "explore": 1.5}}, "Seer.explore: Input should be less than or equal to 1"),
        ({"ordering": {"type": "seer", "exploer": 0.5}}, "Seer.exploer: unknown key; did you mean explore?"),
        ({"chunking": {"type": "fixed", "chunk_tokens": 0}}, "FixedChunks.chunk_tokens"),
        ({"draft_models": {"type": "planned", "drafter": {"base_s": 0}}}, "Planned.drafter.base_s: Input should be"),
        ({"draft_models": {"type": "planned", "verifier": {"tokens_s": 1}}}, "Planned.verifier.tokens_s: unknown key"),
        ({"ordering": {"explore": 0.5}}, "give a name or a mapping with `type`"),
        ({"ordering": 3}, "ordering: give a name"),
        ({"ordering": {"type": "user_policies:LastComeFirst", "args": {"spread": 0}}}, "LastComeFirst.spread"),
        ({"ordering": {"type": "user_policies:LastComeFirst", "args": {"spraed": 1}}}, "LastComeFirst.spraed"),
        ({"ordering": {"type": "user_policies:LastComeFirst", "spread": 1}}, "unknown key 'spread'"),
        ({"ordering": {"type": "user_policies:Nobody"}}, "cannot be imported"),
        ({"ordering": {"type": "no_such_module:Nobody"}}, "cannot be imported"),
        ({"ordering": {"type": ":Nobody"}}, "code of package '' is not allowed"),
        ({"ordering": {"type": "user_policies:NUMBER"}}, "is not a pydantic model"),
        ({"ordering": {"type": "user_policies:NotAPolicy"}}, "with bind, growing_lanes, keys, lane, lanes"),
        ({"placement": {"type": "user_policies:LastComeFirst"}}, "is no placement policy"),
        ({"ordering": "least_kv"}, "unknown ordering 'least_kv'"),
    ],
)
def test_a_mistake_is_named_and_the_mending_too(policies, said):
    assert said in error_of(**policies)


def test_an_unknown_family_is_refused():
    with pytest.raises(ValidationError, match="orderings"):
        Policies(orderings="seer")


def test_policies_are_values():
    assert isinstance(Policies(), BaseModel) and hash(Policies()) == hash(Policies())
    with pytest.raises(ValidationError, match="frozen"):
        Policies().ordering = Fcfs()


def test_an_installed_packages_policy_is_named_like_ours(tmp_path, monkeypatch):
    """By the entry points of its distribution, as pip lays them down."""
    folder = tmp_path / "my_orders-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-orders\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[tailrace.policies]\nordering.last_first = user_policies:LastComeFirst\ntail.gone = nowhere:Tail\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("ordering") == {"last_first": "user_policies:LastComeFirst"}
    policy = Policies(ordering={"type": "last_first", "spread": 5}).ordering
    assert name_of(policy) == "user_policies:LastComeFirst" and policy.spread == 5
    assert Policies(ordering="last_first").ordering.spread == 3
    assert "known: fcfs" in error_of(ordering="last_frist") and "last_first" in error_of(ordering="last_frist")
    assert "cannot be imported" in error_of(tail="gone")
