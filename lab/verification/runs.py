"""The ways to roll out one workload that must not matter: chunks, moves, crashes, batches, and all sources of drafts.

The first run is the reference: no chunks, no moves, no drafts; `plain_rules` is that of runs with rules for tokens,
`plain_adapters` that of runs with adapters. Each of the others differs in several ways at once, so that together they
pass through every drafting policy and every source of drafts. Called by lab/verification/tokens.py.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.lab.verification.asking import in_two_turns, one_by_one
from tailrace.lab.verification.disturbances import (
    flip_kv_bits,
    freeze_a_step,
    kill_a_replica,
    kill_another_driver,
    kill_the_context,
    kill_the_coordinator,
    kill_the_drafter,
    lose_a_replica,
    lose_the_master,
)
from tailrace.lab.verification.services import Engine, Service
from tailrace.policies.families.racing import USUAL, MethodProfile

SHOWN = {
    "drafted_tokens": "nothing was drafted",
    "model_tokens": "no draft was a draft model's",
    "pulled_tokens": "nothing was pulled from the pool",
    "moved_samples": "no sample moved",
    "races": "nothing raced",
    "corrupt_blocks": "no block was found corrupt",
    "adapted_tokens": "no token was of an adapter",
    "note": "its disturbance did not happen",
}
"""Figures that show the purpose of a run, with the fault if one is 0."""


@dataclass(frozen=True, slots=True)
class VerificationRun:
    """One run: policies, the service, and a disturbance of it (returned as a note; empty if it did not happen).

    `shows`: keys of SHOWN; each disturbed run also needs a note.
    `begin`: a disturbance before the caller's driver begins the batch.
    """

    name: str
    policies: dict
    service: Service
    shows: tuple[str, ...] = ("drafted_tokens",)
    disturb: Callable[[RolloutClient, str], Awaitable[str]] | None = None
    begin: Callable[[RolloutClient, RolloutBatch], Awaitable[str]] | None = None
    after_an_epoch: bool = False  # another epoch of the same prompts is rolled out first, and drafted from
    ruled: bool = False  # with rules for tokens; compared with the first run that has them
    adapted: bool = False  # two groups of three with an adapter each; compared with the first such run
    ask: Callable[[RolloutClient, RolloutBatch], Awaitable[list[GroupResult]]] | None = None  # None: as one batch
    clients: int = 0  # of HTTP, which ask in place of the caller's; their results have no raw logprobs

    trajectories: bool = False  # each sample begins a trajectory over HTTP, see `trajectories`

    @property
    def over_http(self) -> bool:
        """Returns whether its results are those of HTTP, without raw logprobs."""
        return bool(self.clients) or self.trajectories

    @property
    def kind(self) -> tuple[bool, bool]:
        """Returns the kind of its workload: runs of one kind have the same tokens."""
        return self.ruled, self.adapted


def chunked(tokens: int, drafting: str | dict, placement: str = "least_kv") -> dict:
    chunking = {"type": "fixed", "chunk_tokens": tokens}
    return {"ordering": "seer", "placement": placement, "chunking": chunking, "drafting": drafting}


def drafts(**changes) -> Engine:
    return (("draft", DraftConfig(**changes)),)


def of_vllm(**drafter) -> Engine:
    """Returns the settings of an engine on which vLLM's own drafter alone drafts."""
    return (*drafts(method="vllm"), ("vllm_args", {"speculative_config": drafter}))


GROUP = drafts(method="group")
LOOKED_UP = of_vllm(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=1)
OWN_CAP_5 = (*drafts(index=IndexSettings(group_context=False, history=False)), ("max_running", 5))
REDRAWN = (*GROUP, ("redraw_close_calls", True))

TWO = Service(GROUP, elastic=True, gateway=True)
DRAFTED = Service(GROUP, drafter=True)
LORA = Service(GROUP, adapters=True)

WHOLE = {"ordering": "fcfs", "placement": "pinned", "chunking": {"type": "fixed", "chunk_tokens": None}}
NGRAM = MethodProfile("ngram", ((0.0, 1.0), (0.9, 3.0)), (0.4,))
RACES = {"racing": {"type": "fastest_of_n", "room": 16, "rungs": (*USUAL, NGRAM)}}
SHRINKS = {"tail": {"type": "consolidate", "after_s": 0.5, "max_slowdown": 9.0}}
BY_KV = {"trajectories": "by_kv"}
MOVES, PULLS = ("drafted_tokens", "moved_samples"), ("drafted_tokens", "pulled_tokens")
FLIPS = (*MOVES, "corrupt_blocks")
MODEL = {"type": "fixed", "tokens": 8}

RUNS = (
    VerificationRun("plain", WHOLE | {"drafting": "off"}, TWO, ()),
    VerificationRun("chunks_of_64", chunked(64, "length_class"), TWO),
    VerificationRun("chunks_of_23", chunked(23, {"type": "aimd", "min_match_tokens": 1}), TWO),
    VerificationRun("moved", chunked(48, "fixed", "round_robin"), TWO, MOVES),
    VerificationRun("raced", chunked(64, "closed_form") | RACES, TWO, ("drafted_tokens", "races"), kill_the_context),
    VerificationRun("history_drafts", chunked(64, "fixed"), TWO, after_an_epoch=True),
    VerificationRun("scaled_down", chunked(32, "goodput", "pinned") | SHRINKS, TWO, MOVES, lose_a_replica),
    VerificationRun("replica_killed", chunked(16, "concurrency", "pinned"), TWO, PULLS, kill_a_replica),
    VerificationRun("single_requests", chunked(32, "fixed", "round_robin"), TWO, MOVES, ask=one_by_one),
    VerificationRun("two_turns", chunked(32, "fixed", "round_robin"), TWO, MOVES, ask=in_two_turns),
    VerificationRun("over_http", chunked(32, "fixed", "round_robin"), TWO, (*MOVES, "note"), clients=3),
    VerificationRun(
        "trajectories", chunked(32, "fixed") | {"trajectories": "by_kv"}, TWO, ("note",), trajectories=True
    ),
    VerificationRun("plain_rules", WHOLE | {"drafting": "off"}, TWO, (), ruled=True),
    VerificationRun("moved_rules", chunked(32, "fixed", "round_robin"), TWO, MOVES, ruled=True),
    VerificationRun("coordinator_killed", chunked(23, "fixed"), TWO, disturb=kill_the_coordinator),
    VerificationRun("driver_killed", chunked(23, "fixed"), TWO, begin=kill_another_driver),
    VerificationRun("kv_bits_flipped", chunked(32, "fixed", "round_robin"), TWO, FLIPS, flip_kv_bits),
    VerificationRun("engine_hung", chunked(23, "fixed"), TWO, disturb=freeze_a_step),
    VerificationRun("master_node_lost", chunked(32, "fixed", "round_robin"), TWO, MOVES, lose_the_master),
    VerificationRun("head_restarted", chunked(23, "fixed"), Service(GROUP, restarted=True), ("drafted_tokens", "note")),
    VerificationRun("own_drafts_cap_5", chunked(64, "fixed"), Service(OWN_CAP_5)),
    VerificationRun("ngram_drafts", chunked(64, "fixed"), Service(LOOKED_UP)),
    VerificationRun("redrawn", chunked(23, "fixed", "round_robin"), Service(REDRAWN), MOVES),
    VerificationRun("plain_adapters", WHOLE | {"drafting": "off"}, LORA, ("adapted_tokens",), adapted=True),
    VerificationRun(
        "moved_adapters", chunked(32, "fixed", "round_robin"), LORA, (*MOVES, "adapted_tokens"), adapted=True
    ),
    VerificationRun("decoupled", chunked(64, MODEL), DRAFTED, ("model_tokens",)),
    VerificationRun("drafter_killed", chunked(23, MODEL), DRAFTED, ("model_tokens",), kill_the_drafter),
)
"""Pinned samples move, and pull KV from the pool, only where their replica goes. History is forgotten before each run:
they sample under the same keys, so each would be drafted from the one before, and every draft would be right.
"""
