"""Tables of a live service: batches, replicas, the longest samples, the KV pool, troubles. Pure: values in, rich
renderables out.
"""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tailrace.app.watch.rates import Rates
from tailrace.deployments.messages.status import PoolView, SampleStatus, ServiceSnapshot

GIB = 1 << 30


def view(status: ServiceSnapshot, rates: Rates, max_replicas: int) -> RenderableType:
    """Returns the whole view. `max_replicas`: rows of replicas, those that need attention first, then the fullest."""
    parts = [_headline(status, rates)]
    parts += [Text(f"! {line}", style="bold red") for line in troubles(status)]
    if status.batches:
        parts.append(_batches(status, rates))
    parts.append(_replicas(status, rates, max_replicas))
    if status.longest:
        parts.append(_samples(status.longest))
    if status.pool is not None:
        parts.append(Text(pool_line(status.pool), style="dim"))
    return Group(*(line for part in parts for line in (part, "")))


def troubles(status: ServiceSnapshot) -> list[str]:
    """Returns one line for each thing that may need repair."""
    found = [f"nothing can run: waits for {status.waits_for}"] if status.waits_for else []
    found += [f"{one.replica_id} is set aside: {one.aside}" for one in status.replicas if one.aside]
    pool = status.pool
    if pool is not None and pool.status is None:
        found.append(f"the KV pool is down: {pool.problem}")
    if pool is not None:
        found += [f"{name} runs without the KV pool: {why}" for name, why in pool.problems.items()]
    found += [f"batch {name} waits for a change of policies, limits or journal" for name in status.at_admission]
    if status.contained:
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(status.contained.items()))
        found.append(f"errors contained so far: {counts}")
    return found


def pool_line(pool: PoolView) -> str:
    """Returns the pool's content, and the sources of the KV of contexts so far."""
    words = ["KV pool:"]
    if pool.status is not None:
        used, whole = pool.status["dram_bytes"] / GIB, pool.status["dram_capacity_bytes"] / GIB
        words.append(f"{used:.2f} of {whole:.2f} GiB, {pool.status['keys']:,} keys;")
    counts = {"here": 0, "pool": 0, "recomputed": 0}
    for name, count in pool.counts.items():
        kind = name.partition(".")[0]
        if kind in ("local_tokens", "pool_tokens", "recomputed_tokens"):
            counts[{"local_tokens": "here", "pool_tokens": "pool", "recomputed_tokens": "recomputed"}[kind]] += count
    total = sum(counts.values())
    words.append(f"context tokens {', '.join(f'{kind} {share(n, total)}' for kind, n in counts.items())}")
    return " ".join(words)


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _headline(status: ServiceSnapshot, rates: Rates) -> Text:
    words = [f"{status.model.rstrip('/').rpartition('/')[2]}, weights {status.weights_version}"]
    if status.weights_digest:
        words[0] += f" ({status.weights_digest[:12]})"
    if status.exactness == "law":
        words.append("exactness law")
    words.append(f"{status.running:,} running, {status.waiting:,} waiting")
    if status.held:
        words.append(f"{status.held:,} held between turns")
    words.append(f"{_rate(rates.service())} tokens/s")
    text = Text("; ".join(words), style="bold")
    if status.paused:
        text.append("; PAUSED", style="bold yellow")
    return text


def plain_table(*columns: str, words: Sequence[str] = (), wrapped: str = "") -> Table:
    """Returns a plain table. `words`: columns of text, on the left. `wrapped`: the column whose text may take several
    lines.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")  # 80 columns are enough
    for place, column in enumerate(columns):
        table.add_column(
            column, justify="left" if place == 0 or column in words else "right", no_wrap=column != wrapped
        )
    return table


def _batches(status: ServiceSnapshot, rates: Rates) -> Table:
    table = plain_table("batch", "ended", "samples", "groups out", "tokens", "tokens/s", "seconds", "")
    for batch in status.batches:
        cells = (
            Text(batch.batch_id), share(batch.ended, batch.samples), f"{batch.ended:,}/{batch.samples:,}",
            f"{batch.emitted:,}/{batch.groups:,}", f"{batch.tokens:,}", _rate(rates.batch(batch.batch_id)),
            f"{batch.seconds:,.0f}", Text("tail", style="yellow") if batch.tail else "",
        )  # fmt: skip
        table.add_row(*cells)
    return table


def _replicas(status: ServiceSnapshot, rates: Rates, max_rows: int) -> RenderableType:
    if not status.replicas:
        return Text("no engine replica is up", style="yellow")
    ordered = sorted(status.replicas, key=lambda one: (one.state == "ready", -one.running))[:max_rows]
    table = plain_table("replica", "state", "running", "KV", "weights", "tokens/s", "per step", "accepted",
                        "preempted", words=("state", "accepted"))  # fmt: skip
    for replica in ordered:
        rate = rates.replica(replica.replica_id)
        accepted = ", ".join(f"{name} {part:.0%}" for name, part in (rate.accepted or {}).items())
        table.add_row(
            Text(replica.replica_id),
            Text(replica.state, style="" if replica.state == "ready" else "yellow"),
            f"{replica.running}/{replica.max_running}",
            f"{replica.kv_used_share:.0%}",
            str(replica.weights_version),
            _rate(rate.tokens_per_s),
            "-" if rate.tokens_per_step is None else f"{rate.tokens_per_step:.2f}",
            accepted or "-",
            f"{replica.preemptions:,}",
        )
    more = len(status.replicas) - len(ordered)
    return Group(table, Text(f"{more:,} more replicas", style="dim")) if more else table


def _samples(longest: Sequence[SampleStatus]) -> Table:
    table = plain_table("longest samples", "state", "replica", "tokens", "expected", "max", "chunks", "copies",
                        words=("state", "replica"))  # fmt: skip
    for sample in longest:
        where = sample.replica_id or "-"
        counts = (sample.tokens, sample.expected_tokens, sample.max_tokens, sample.chunks, sample.copies)
        table.add_row(Text(sample.sample_id), sample.state, where, *(f"{count:,}" for count in counts))
    return table
