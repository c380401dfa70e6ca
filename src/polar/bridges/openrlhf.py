"""OpenRLHF: an agent executor whose samples are Polar's sessions. `openrlhf_trainer` has the trainer's side of it.

    POLAR_BRIDGE=bridge.toml python -m polar.bridges.openrlhf \\
        --data.prompt_dataset rows.jsonl --data.input_key prompt --data.label_key task_id \\
        --rollout.batch_size 16 --rollout.n_samples_per_prompt 8 --train.batch_size 256 \\
        --algo.advantage.estimator group_norm --actor.model_name_or_path ... (and the rest of train_ppo_ray's)

is `python -m openrlhf.cli.train_ppo_ray` with this module as its agent. The label of a row names a task; its prompt is
only logged. OpenRLHF's engines live inside Ray actors, where nobody else can reach them: the executor runs there, and
serves its engine to Polar (`openrlhf_engine`).

Who divides: OpenRLHF, by all tokens that train in an optimizer step; `weight` is not applied. A rollout is one step:
`--train.batch_size` is how many rows there may be in it, at least as many as traces.

What is left out: sessions without a reward. Advantages are over the others of the group, as if it had been that small;
a session that is alone has none. In an evaluation, a prompt without any session that has a reward counts for no mean,
and the log says how many there were. A trace longer than `--data.max_len` is an error, not cut, and so are
log-probabilities of another temperature than the trainer's. Policy versions are not in OpenRLHF's rows. Not taken:
`--train.async_enable` (its actors are made where nothing can be put in their place), dynamic batches, critics, and
whatever goes by rows.
"""

import asyncio
from typing import Any

from msgspec import Struct

from polar.bridges.checks import check_temperature
from polar.bridges.rollouts import SessionGroup
from polar.bridges.sampling import build_sampling_overrides
from polar.bridges.settings import SettingsSource, load_settings
from polar.bridges.shared_groups import get_shared_groups, has_failed
from polar.errors import ConfigError
from polar.export.openrlhf import OpenRlhfExporter


class GroupLabel(Struct, frozen=True):
    """What the trainer tells the executor of a group, in the place of the row's label."""

    task: str
    key: str
    samples: int
    version: int
    is_training: bool


def make_agent_executor(source: SettingsSource = None, *, serves_engine: bool = True) -> type[Any]:
    """The class that OpenRLHF wants in an agent's file. `serves`: it hands its engine to Polar."""
    from openrlhf.utils.agent import AgentExecutorBase

    class AgentExecutor(AgentExecutorBase):
        def __init__(self) -> None:
            self._settings = load_settings(source)
            self._server_task: asyncio.Future[None] | None = None

        async def execute(
            self,
            prompt: str,
            label: GroupLabel,
            sampling_params: Any,
            max_length: int,
            hf_tokenizer: Any,  # noqa: ARG002  # the gateway has its own
            llm_engine: Any,
            images: Any = None,  # noqa: ARG002  # what the model sees is the harness's matter
        ) -> dict[str, Any]:
            if not isinstance(label, GroupLabel):
                raise ConfigError("Start the training with `python -m polar.bridges.openrlhf`, which has this agent.")
            if serves_engine:
                if self._server_task is None or has_failed(self._server_task):
                    self._server_task = asyncio.ensure_future(self._serve(llm_engine, max_length, label.version))
                await asyncio.shield(self._server_task)
            # The trainer computes log-probabilities at its own temperature: that is what has to be sampled with.
            temperature = sampling_params.temperature
            over = build_sampling_overrides(
                temperature=temperature, top_p=sampling_params.top_p, top_k=sampling_params.top_k
            )
            groups = get_shared_groups(self._settings)
            group, number = await groups.claim_session(label.task, label.key, label.samples, over)
            logprobs = sampling_params.logprobs is not None
            if label.is_training and logprobs:
                check_temperature(group.items[number : number + 1], temperature)
            return _build_response(prompt, group, number, logprobs=logprobs)

        async def _serve(self, engine: Any, context: int, version: int) -> None:
            from polar.bridges.openrlhf_engine import EngineServer

            url = await EngineServer(engine, context).start()
            await get_shared_groups(self._settings).rollouts.client.add_engine(url, version)

    return AgentExecutor


def __getattr__(name: str) -> Any:
    """OpenRLHF loads this file as its agent's, and looks for a class in it."""
    if name == "AgentExecutor":
        from polar.bridges import openrlhf  # by its own name, by which the trainer's labels come

        return openrlhf.make_agent_executor()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _build_response(prompt: str, group: SessionGroup, number: int, *, logprobs: bool) -> dict[str, Any]:
    """One session as an executor's result: its last trace, and all of them as `traces`."""
    if number >= len(group.items):  # it was left out
        # OpenRLHF filters groups by their mean, which this leaves as it is; advantages are without it (`BySession`).
        mean = sum(group.rewards) / len(group.rewards) if group.rewards else 0.0
        return _build_empty_response(prompt, group.task, mean, logprobs=logprobs)
    rows = [row | {"prompt": prompt, "label": group.task} for row in OpenRlhfExporter().lines(group.items[number])]
    if not logprobs:
        rows = [row | {"rollout_log_probs": None} for row in rows]
    elif any(row["rollout_log_probs"] is None for row in rows):
        raise ConfigError("OpenRLHF corrects by log-probabilities, and the engine gives none: set [engine] logprobs.")
    return rows[-1] | {"traces": rows}


def _build_empty_response(prompt: str, task: str, reward: float, *, logprobs: bool) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "label": task,
        "images": None,
        "mm_train_inputs": None,
        "reward": reward,
        "scores": reward,
        "observation_tokens": [0, 0],
        "action_ranges": [],
        "rollout_log_probs": [0.0, 0.0] if logprobs else None,
        "truncated": False,
        "extra_logs": {},
        "traces": [],
    }


if __name__ == "__main__":
    from polar.bridges.openrlhf_trainer import main

    main()
