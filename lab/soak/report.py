"""The report of a soak in words: figures, memory by role, and whether it is well. Called by `tailrace soak`."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

FIGURES = ("batches", "samples", "tokens", "updates", "repeated", "lost", "wrong", "unfinished", "left_over")
HEADS = ("role", "alive", "ended", "MB at start", "MB at end", "MB per hour", "files at start", "files at end")


def faults_of(report: Mapping) -> list[str]:
    """Returns each reason why the soak is not well, in one line; none if it is."""
    found = [
        f"{report[key]} {said}" for key, said in (("lost", "samples lost"), ("wrong", "samples wrong")) if report[key]
    ]
    found += [f"{count} failed: {reason}" for reason, count in report["failed"].items()]
    found += [f"driver error: {text}" for text in report["driver_errors"]]
    if error := report["crossed"].get("error"):
        found.append(f"the check of the samples that crossed an update ended: {error}")
    if report["left_over"]:
        found.append(f"{report['left_over']} processes left over")
    if not report["samples"]:
        found.append("no sample has ended")
    return found


def lines(report: Mapping) -> list[str]:
    """Returns the figures as lines of text."""
    minutes = report["seconds"] / 60
    stopped = ", stopped early" if report["stopped"] else ""
    crossed = report["crossed"]
    by_kind = ", ".join(f"{kind} {count}" for kind, count in report["faults"].items()) or "none"
    found = [
        f"{minutes:.1f} minutes, seed {report['seed']}{stopped}",
        ", ".join(f"{key.replace('_', ' ')} {report[key]:,}" for key in FIGURES),
        f"faults: {by_kind}; {report['faults_without_a_victim']} found nothing to disturb",
        f"longest time without a new token: {report['longest_silence_s']:.0f} s",
        f"crossed an update: {crossed['samples']} samples; of the stretches after it {crossed['checked']} made again "
        f"and compared, {crossed['unchecked']} not",
        "contained errors: " + (", ".join(f"{name} {count}" for name, count in report["contained"].items()) or "none"),
    ]
    found += [f"fault failed: {count} {note}" for note, count in report["faults_that_failed"].items()]
    found += [f"failed: {count} {reason}" for reason, count in report["failed"].items()]
    found += [f"wrong: {one}" for one in report["first_wrong"]]
    return found


def memory_rows(report: Mapping) -> list[Sequence[str]]:
    """Returns heads, then a row for each role: processes alive at the end, their sums, and how many have ended."""
    memory, by_role = report["memory"], defaultdict(list)
    for row in memory["processes"]:
        by_role[row["role"]].append(row)
    rows: list[Sequence[str]] = [HEADS]
    for role, ours in by_role.items():
        sums = {key: sum(row[key] for row in ours) for key in ("start_mb", "end_mb", "start_files", "end_files")}
        slopes = [f"{row['mb_per_hour']:+.1f}" for row in ours if row["mb_per_hour"] is not None]
        count, ended = str(len(ours)), str(memory["ended"].get(role, 0))
        sizes = f"{sums['start_mb']:,.0f}", f"{sums['end_mb']:,.0f}"
        files = f"{sums['start_files']:,}", f"{sums['end_files']:,}"
        rows.append((role, count, ended, *sizes, ", ".join(slopes) or "too short", *files))
    return rows
