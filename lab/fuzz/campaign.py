"""Many seeds on all cores: outcomes as they come, and the shortest plan that still fails."""

import gc
import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context

from tailrace.lab.fuzz.odd.plan import PLAIN
from tailrace.lab.fuzz.run import SINGLES_SHARE, Outcome, RunPlan, plan_of, run
from tailrace.lab.fuzz.worlds.plan import PLAIN as NO_WORLD
from tailrace.policies.protocol.exactness import Exactness

BATCH = 8
"""Number of seeds that a process runs in a row."""


def campaign(
    seeds: Iterable[int], kinds: tuple[str, ...], workers: int | None = None, exactness: Exactness = "bits"
) -> Iterator[Outcome]:
    """Runs all seeds, with faults of these kinds. Yields outcomes in no order."""
    pool = ProcessPoolExecutor(workers or os.cpu_count(), mp_context=get_context("spawn"))
    try:
        for job in as_completed([pool.submit(_run_all, several, kinds, exactness) for several in _batches(seeds)]):
            yield from job.result()
    finally:
        pool.shutdown(cancel_futures=True)  # not by `with`, which shuts down again and cancels nothing


def _batches(seeds: Iterable[int]) -> Iterator[tuple[int, ...]]:
    left = iter(seeds)
    while several := tuple(islice(left, BATCH)):
        yield several


def _run_all(seeds: tuple[int, ...], kinds: tuple[str, ...], exactness: Exactness) -> list[Outcome]:
    logging.disable(logging.ERROR)  # contained errors are expected here
    gc.collect()
    gc.freeze()  # each run collects its own garbage; the modules need not be looked at again
    gc.set_threshold(50_000)  # and at its end: in between, 700 allocations are too few to look for it
    return [outcome_of(seed, kinds, exactness=exactness) for seed in seeds]


def outcome_of(
    seed: int, kinds: tuple[str, ...], singles: float = SINGLES_SHARE, exactness: Exactness = "bits"
) -> Outcome:
    """Runs one seed, see `plan_of`. Returns its outcome; an exception of the simulation itself is a failure, too."""
    return _outcome_of(plan_of(seed, kinds, singles, exactness))


def _outcome_of(plan: RunPlan) -> Outcome:
    try:
        return run(plan)
    except Exception as error:  # noqa: BLE001 - the edge of a run: the seed is named, the others continue
        return Outcome(plan.seed, f"the simulation ended with {error!r}", plan.all_faults)


def described(plan: RunPlan) -> list[str]:
    """Returns a plan in lines, for people."""
    size = plan.size
    lines = [f"seed {plan.seed}: {size.replicas} replicas, limits {size.limits}, policies {size.policies}"]
    lines += [f"  noise at {size.noise:.0%} of positions"] if size.noise else []
    for d in plan.drivers:
        odd = [kind for kind in ("hasty", "impossible", "grows", "overtakes") if getattr(d, kind)]
        work = f"{d.steps} steps of {d.groups} x {d.samples} x {d.max_tokens}"
        lines.append(" ".join([f"  driver {d.name}: {work}", *odd]))
    lines += [
        f"  at {f.at_s:6.2f} s {f.kind} (target {f.target}, {f.seconds} s, number {f.number})" for f in plan.all_faults
    ]
    if plan.odd != PLAIN:
        lines.append(f"  {plan.odd}")
    if plan.worlds != NO_WORLD:
        lines.append(f"  {plan.worlds}, quotas {size.quotas}")
    return lines


PLAIN_DRIVER = {"hasty": False}, {"impossible": False}, {"grows": False}, {"overtakes": False}


def shortened(plan: RunPlan) -> RunPlan:
    """Returns the plan with as few faults and drivers as still fail."""
    shorter = True
    while shorter:
        shorter = False
        for candidate in _shorter(plan):
            if _outcome_of(candidate).problem is not None:
                plan, shorter = candidate, True
                break
    return plan


def _shorter(plan: RunPlan):
    for i in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:i] + plan.faults[i + 1 :])
    for field, default in vars(PLAIN).items():
        if getattr(plan.odd, field) != default:
            yield replace(plan, odd=replace(plan.odd, **{field: default}))
    if plan.worlds != NO_WORLD or plan.size.quotas:
        yield replace(plan, worlds=NO_WORLD, size=replace(plan.size, quotas={}))
    for i in range(len(plan.drivers) if len(plan.drivers) > 1 else 0):
        yield replace(plan, drivers=plan.drivers[:i] + plan.drivers[i + 1 :])
    for i, driver in enumerate(plan.drivers):
        for smaller in ({"steps": 1}, {"groups": 1}, {"samples": 1}, *PLAIN_DRIVER):
            if all(getattr(driver, name) > value for name, value in smaller.items()):
                drivers = (*plan.drivers[:i], replace(driver, **smaller), *plan.drivers[i + 1 :])
                yield replace(plan, drivers=drivers)
