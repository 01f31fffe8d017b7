"""Where the seconds of a simulated step went: the life of the sample that ended last, in parts that add up to it.

The step ends with it, so what is saved of its parts is saved of the step, up to the sample that ends next. Called by
`Setup.run` where spans were asked for.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from tailrace.app.simulator.acceptance import Chances
from tailrace.app.simulator.bounds import alone_s
from tailrace.app.simulator.host import TURN_MARK
from tailrace.app.simulator.types import Cluster, Ended, SimulatedRun, Span, StepModel, Workload, WorkloadGroup

PARTS = ("waited_s", "loaded_s", "crowd_s", "drafts_s", "alone_s")


def account(
    run: SimulatedRun, workload: Workload, cluster: Cluster, acceptance: Chances | None, most_drafts: int
) -> dict[str, float]:
    """Seconds of the last samples of all steps, by PARTS.

    waited_s: it was not running: order, room, hand-overs. loaded_s: KV fetched, and context computed. crowd_s: what
    its engine steps took beyond their time without mates, prompts of others included. drafts_s: what its steps without
    mates would take beyond those of the best drafts that anybody could have. alone_s: the time of these, below which
    no policy comes.
    """
    found = dict.fromkeys(PARTS, 0.0)
    by_sample: dict[str, list[Span]] = {}
    for span in run.spans:
        by_sample.setdefault(span.sample_id.partition(TURN_MARK)[0], []).append(span)
    for last in _last(run.ended):
        group, index = _member(workload.steps[last.step], last.sample_id)
        best_s = alone_s(group, index, cluster.replica, acceptance, most_drafts)
        for name, seconds in _parts(last, by_sample[last.sample_id], group, cluster.replica.step, best_s).items():
            found[name] += seconds
    return found


def _last(ended: Sequence[Ended]) -> Iterator[Ended]:
    """Of each step, the sample that ended last."""
    for _, samples in groupby(sorted(ended, key=lambda one: one.step), key=lambda one: one.step):
        yield max(samples, key=lambda one: one.ended_s)


def _member(groups: Sequence[WorkloadGroup], sample_id: str) -> tuple[WorkloadGroup, int]:
    group_id, _, index = sample_id.rpartition("#")
    return next(group for group in groups if group.group_id == group_id), int(index)


def _parts(
    last: Ended, spans: Sequence[Span], group: WorkloadGroup, step: StepModel, best_s: float
) -> dict[str, float]:
    made = [span for span in spans if span.role == "generate"]
    generated_s = sum(span.end_s - span.begin_s for span in made)
    loaded_s = sum(span.end_s - span.begin_s for span in spans if span.role in ("fetch", "prefill"))
    own_s, context = 0.0, group.prompt_tokens
    computed = 1.0 + last.drafted / max(1.0, last.verifications)
    for span in made:
        own_s += span.verifications * step.seconds(computed, context + span.tokens / 2)
        context += span.tokens
    waited_s = last.ended_s - last.submitted_s - generated_s - loaded_s
    parts = (waited_s, loaded_s, generated_s - own_s, own_s - best_s, best_s)
    return dict(zip(PARTS, parts, strict=True))
