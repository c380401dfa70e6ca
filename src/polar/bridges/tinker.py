"""Tinker: groups of sessions as `Datum`s for `forward_backward`.

    from polar.bridges.tinker import Tinker

    with Tinker("polar.toml") as polar:
        for step in range(100):
            batch = polar.batch(tasks, step)                                      # names of tasks
            training_client.forward_backward(batch.datums, loss_fn="importance_sampling").result()
            training_client.optim_step(types.AdamParams(learning_rate=1e-5)).result()
            with polar.updating(step + 1):
                ...                                                               # your engine loads the new weights

Who divides: nobody at Tinker, whose losses are sums over tokens. So the bridge does: an advantage is the session's,
over its group, divided by the session's trainable tokens and by the batch's sessions. That is `weight` applied, once:
the loss is the mean over sessions of the mean over their tokens, however many traces a session has. With `per_token` it
is divided by all trainable tokens of the batch instead.

Tinker's models have no address that Polar could attach. What samples is an engine of your own, with the weights of each
step: load them within `polar.updating(version)`. A trainer that starts again loads those of its first step so, before
it asks for a batch: how far the one before it came is unknown. Your engine is not probed: the bridge has no model to
score with. `forward_backward` returns Tinker's log-probabilities: compare them with those of the datums.

What is left out: rewards of single turns; and a trace without a prompt, which has no input for its first token.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, field

from polar.bridges.advantages import compute_session_advantages
from polar.bridges.bridge import BlockingBridge
from polar.bridges.rollouts import SessionGroup
from polar.export.tinker import TinkerExporter as Exporter
from polar.export.tinker import to_datum


class Batch(Struct):
    """The training data of a step."""

    datums: list[Any]
    rewards: list[float]  # of all sessions
    left_out: Counter[str] = field(default_factory=Counter)


class Tinker(BlockingBridge):
    """Use as a context manager, or close it."""

    _has_resumed = False

    def batch(self, tasks: Iterable[str], step: int, *, samples: int | None = None, per_token: bool = False) -> Batch:
        """Runs groups of these tasks at this step, or returns the same sessions again. Raises ConfigError,
        ClientError."""
        if not self._has_resumed:
            self.run(self.engines.resume_if_paused())
            self._has_resumed = True
        return build_batch(self.run_groups(tasks, f"step-{step}", samples=samples), per_token=per_token)


def build_batch(groups: Sequence[SessionGroup], *, per_token: bool = False) -> Batch:
    """Builds a batch from finished groups."""
    left_out: Counter[str] = Counter()
    for group in groups:
        left_out.update(group.left_out)
    sessions = sum(len(group.items) for group in groups)
    trained = sum(_count_trainable_tokens(item) for group in groups for item in group.items)
    datums = []
    for group in groups:
        for item, advantage in zip(group.items, compute_session_advantages(group.rewards), strict=True):
            divisor = trained if per_token else sessions * _count_trainable_tokens(item)
            exporter = Exporter()
            datums += [to_datum(row, advantage / divisor) for row in exporter.build_lines(item)]
            left_out.update(exporter.left_out)
    return Batch(datums, [reward for group in groups for reward in group.rewards], left_out)


def _count_trainable_tokens(item: Any) -> int:
    return sum(int(trace.loss_mask.sum()) for trace in item.trajectory.traces)
