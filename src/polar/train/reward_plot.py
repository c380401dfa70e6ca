"""A training run as a picture: what training and held-out tasks earned, step by step."""

from collections.abc import Sequence
from pathlib import Path

from polar.train.metrics import StepMetrics


def plot_rewards(history: Sequence[StepMetrics], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    training = [(one.step, one.reward) for one in history if one.reward is not None and one.step]
    held_out = [(one.step, one.held_out) for one in history if one.held_out is not None]
    if training:
        axes.plot(
            *zip(*training, strict=True), color="#7aa6c2", marker=".", label="training tasks, while they are sampled"
        )
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color="#c1440e", marker="o", label="held-out tasks")
    axes.set(xlabel="step", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if training or held_out:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
