"""Draw docs/images/tail.png: unfinished samples over time, static groups against Tailrace, both simulated.

The runs are those of `tailrace simulate --workload das-7b-16k --scale 0.5 --compare verl,tailrace`.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tailrace.app.report.curves import ended_share
from tailrace.app.simulator.scenario import load_scenario
from tailrace.app.simulator.systems import Setup, system

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "tail.png"
LABELS = {"verl": "static groups (as verl)", "tailrace": "tailrace"}
COLOURS = {"verl": "#9a9a9a", "tailrace": "#0b6e99"}


def draw() -> None:
    setup = Setup.of(load_scenario("das-7b-16k").scaled(0.5), 0)
    figure, axes = plt.subplots(figsize=(8, 3.2), dpi=110)
    for name, label in LABELS.items():
        run = setup.run(name, system(name), 0)
        points = ended_share(run.ended)
        times = [0.0, *(at for at, _ in points)]
        left = [100.0, *(100 * (1 - share) for _, share in points)]
        axes.fill_between(times, left, step="post", alpha=0.2, color=COLOURS[name])
        axes.step(times, left, where="post", color=COLOURS[name], label=f"{label}: {run.makespan_s:.0f} s")
    axes.set(xlabel="seconds", ylabel="unfinished samples, %", xlim=0, ylim=(0, 101))
    axes.set_title("One step of DAS's 7B workload, simulated", loc="left", fontsize=11)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(PICTURE)


if __name__ == "__main__":
    draw()
