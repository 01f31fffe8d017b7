"""The picture of a run: reward and held-out accuracy, loss, and the seconds of each step by activity."""

from collections.abc import Sequence

from tailrace.app.files.figures import save
from tailrace.app.files.output_file import OutputFile
from tailrace.app.train.record.accuracy import Accuracy
from tailrace.app.train.record.ledger import LedgerRow

KINDS = {"rollout": "#0072b2", "rewards": "#e69f00", "weights": "#009e73", "train": "#d55e00"}
"""Seconds by kind of work, in the order of a step, with their colours."""

HELD_OUT = {"sampled": "#d55e00", "greedy": "#009e73"}
"""Accuracies, with their colours."""

WINDOW = 10
"""Number of steps of the moving mean of rewards and loss."""


def draw(rows: Sequence[LedgerRow], accuracies: Sequence[Accuracy], file: OutputFile) -> None:
    """Writes a PNG. Needs the extra `bench` (matplotlib) and one row or more."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [row.step for row in rows]
    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    rewards = [row.reward_mean for row in rows]
    top.plot(steps, rewards, ".", color="#bbbbbb", markersize=4, label="mean reward of a step")
    top.plot(steps, _moving_mean(rewards), color="#0072b2", label=f"its mean over {WINDOW} steps")
    if accuracies:
        for name, colour in HELD_OUT.items():
            means = [(each.step, mean) for each in accuracies if (mean := getattr(each, name))]
            top.errorbar(
                [step for step, _ in means],
                [mean.value for _, mean in means],
                yerr=[mean.standard_error for _, mean in means],
                fmt="o-",
                color=colour,
                capsize=3,
                label=f"held-out questions, {name}, one standard error",
            )
    top.set_ylabel("reward, accuracy")
    top.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    loss = [row.loss for row in rows]
    middle.plot(steps, loss, ".", color="#bbbbbb", markersize=4)
    middle.plot(steps, _moving_mean(loss), color="#0072b2")
    middle.set_ylabel("loss")
    floor = [0.0] * len(rows)
    for kind, colour in KINDS.items():
        height = [getattr(row.seconds, kind) for row in rows]
        bottom.bar(steps, height, bottom=floor, width=1.0, color=colour, label=kind)
        floor = [below + more for below, more in zip(floor, height, strict=True)]
    bottom.set_ylabel("seconds of a step")
    bottom.set_xlabel("step")
    bottom.legend(frameon=False, ncols=len(KINDS), loc="upper right")
    for axes in (top, middle, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, file, dpi=120)
    pyplot.close(figure)


def _moving_mean(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
