"""ART: groups of sessions as `TrajectoryGroup`s, with the tokens that were recorded.

    from polar.bridges.art import Art

    async with Art("polar.toml") as polar:
        for step in range(await model.get_step(), 100):
            await polar.attach(model)                       # its engine is Polar's, with the weights of this step
            groups = await polar.run_groups(tasks, step)        # names of tasks
            await backend.train(model, groups, learning_rate=1e-5)

Who divides: ART. Advantages are over the trajectories of a group, which are sessions; a session's traces are histories
of its trajectory, each token with the weight 1 / tokens of the whole trajectory. So a session counts once however many
traces it has, and `weight` is not applied again.

ART up to 0.5.18 has no place for token ids: it renders messages anew, and looks up sampled tokens in the replies. What
it would train on then need not be what the engine was given. So histories are of a kind of their own here, and ART's
`tokenize_trajectory` is told what their tokens are; all others it makes as ever. That is so where ART tokenizes in this
process (LocalBackend); a ServerlessBackend sends messages elsewhere, and must not be used.

Sampling is the service's `[engine.sampling]` and the tasks' `sampling`: nothing of ART's settings goes to it, as its
users make their own calls. Its loss takes log-probabilities at temperature 1: sample at 1 and leave `top_p` alone.

The engine is not probed: the model is inside ART's backend, which scores nothing for others.

What is left out: texts (a trajectory has no messages; `polar show` has them), and rewards of single turns.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

from polar.bridges.bridge import AsyncBridge
from polar.bridges.rollouts import SessionGroup
from polar.errors import ConfigError
from polar.export.art import FLAG_SAMPLED
from polar.export.art import ArtExporter as Exporter
from polar.export.base import list_version_runs


class Art(AsyncBridge):
    """Use as an async context manager, or close it."""

    async def run_groups(self, tasks: Iterable[str], step: int, *, samples: int | None = None) -> list[Any]:
        """Runs these tasks at this step, or returns the same sessions again, as `TrajectoryGroup`s. Raises ConfigError,
        ClientError."""
        return [
            to_trajectory_group(group)
            for group in await self.rollouts.run_groups(tasks, f"step-{step}", samples=samples)
        ]

    async def attach(self, model: Any) -> None:
        """Attaches the model's engine, which has the newest weights once ART's `train` has returned."""
        if model.inference_base_url is None:
            raise ConfigError("The model has no engine yet: register it with a backend first.")
        await self.engines.attach([model.inference_base_url], await model.get_step())


def to_trajectory_group(group: SessionGroup) -> Any:
    """Converts a group. Its metadata counts the sessions that were left out."""
    from art import Trajectory, TrajectoryGroup

    history_class = _make_history_class()
    trajectories = []
    for item in group.items:
        versions = [version for trace in item.trajectory.traces for version in list_version_runs(trace)]
        rows = list(Exporter().build_lines(item))
        trajectories.append(
            Trajectory(
                additional_histories=[history_class(messages_and_choices=[], row=row) for row in rows],
                reward=item.session.reward or 0.0,
                initial_policy_version=min(versions, default=None),
                final_policy_version=max(versions, default=None),
                metrics={"traces": len(rows)},
                metadata={"session_id": item.session.session_id, "task_id": group.task},
            )
        )
    left_out = {f"left_out/{reason}": count for reason, count in group.left_out.items()}
    return TrajectoryGroup(trajectories, metadata={"task_id": group.task, **left_out})


@cache
def _make_history_class() -> type[Any]:
    """A `History` with recorded tokens, which a patched `tokenize_trajectory` uses."""
    from art.preprocessing import tokenize
    from art.trajectories import History
    from pydantic import Field

    class TraceHistory(History):
        row: dict[str, Any] = Field(exclude=True)

    tokenize_messages = tokenize.tokenize_trajectory

    def tokenize_trajectory(
        tokenizer: Any, image_processor: Any, history: Any, advantage: float, *args: Any, **options: Any
    ) -> Any:
        if not isinstance(history, TraceHistory):
            return tokenize_messages(tokenizer, image_processor, history, advantage, *args, **options)
        row = history.row
        span_starts = [start for start, _ in row["history"]["sampled_spans"]]
        return tokenize.TokenizedResult(
            advantage=advantage,
            chat="",
            token_ids=row["tokens"],
            input_pos=list(range(len(row["tokens"]))),
            assistant_mask=[int(bool(flags & FLAG_SAMPLED)) for flags in row["flags"]],
            logprobs=[float(value) for value in row["logprobs"]],
            pixel_values=None,
            image_grid_thw=None,
            trajectory=options["trajectory"] if "trajectory" in options else args[1],
            choice_offsets=span_starts,
            extra_logprobs={},
            _tokenizer=tokenizer,
        )

    tokenize.tokenize_trajectory = tokenize_trajectory
    return TraceHistory
