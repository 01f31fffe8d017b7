"""Draws docs/images/tail.png: unfinished samples over time in the recorded demo, static groups against Tailrace.

To renew the recording, run `make demo` on an idle machine, then
`cp out/demo/*.gz out/demo/about.json lab/demo/recorded/`, then this script. Then renew the figures in README.md;
tests/lab/test_demo.py compares them with the recording.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tailrace.lab.demo.outcome import NAMES, RECORDED, read
from tailrace.lab.demo.page import unfinished

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "tail.png"
COLOURS = {"static": "#9a9a9a", "tailrace": "#0b6e99"}


def draw() -> None:
    outcome = read(RECORDED)
    figure, axes = plt.subplots(figsize=(8, 3.2), dpi=110)
    for name, record in outcome.records.items():
        points = unfinished(record.run)
        times, left = [at_s for at_s, _ in points], [100 * share for _, share in points]
        axes.fill_between(times, left, step="post", alpha=0.2, color=COLOURS[name])
        label = f"{NAMES[name]}: {record.run.makespan_s:.0f} s"
        axes.step(times, left, where="post", color=COLOURS[name], label=label)
    axes.set(xlabel="seconds", ylabel="unfinished samples, %", xlim=0, ylim=(0, 101))
    samples = len(outcome.records["static"].run.ended)
    axes.set_title(
        f"make demo: {samples} samples on {outcome.about['replicas']} replicas, {outcome.about['cores']} cores",
        loc="left", fontsize=11,
    )  # fmt: skip
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE)


if __name__ == "__main__":
    draw()
