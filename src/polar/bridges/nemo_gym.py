"""NeMo Gym: an agent server whose every `/run` is a session of Polar, for the Gym's own collection and for NeMo RL.

It takes a folder beside the Gym's own agents, `responses_api_agents/polar_agent`, with a `requirements.txt` that names
polar and an `app.py`:

    from polar.bridges.nemo_gym import agent_class

    PolarAgent = agent_class()
    if __name__ == "__main__":
        PolarAgent.run_webserver()

and an entry in the Gym's configuration:

    polar_agent:
      responses_api_agents:
        polar_agent:
          entrypoint: app.py
          polar: {server: "http://127.0.0.1:8080", tasks: [tasks.jsonl], name: first}

A row of data is `{"task_id": "...", "responses_create_params": {"input": []}, "agent_ref": {"name": "polar_agent"}}`.
What the model sees is the harness's matter; of the parameters, `temperature`, `top_p` and `max_output_tokens` count.

A run has one response, and NeMo RL takes one row from it: so `response` is one trace, that of the main agent (of
several, the one that trains most). The others come with it under `polar_others`, each a verify response of its own:
NeMo RL's own loop leaves them out, `polar.bridges.nemo_rl` takes them. `polar_traces` says how many there are, and
`polar_share` how much of the session's trainable tokens `response` has, so the trainer's metrics show what is lost.

Who divides: see `polar.bridges.nemo_rl`. What is lost: as in `polar.export.nemo_gym`.

A session without a reward has no tokens to train either, here: its output is empty and `_ng_failure_class` is the
reason. The Gym's collection puts it aside and asks again when it is resumed, for a new session; NeMo RL refuses it. A
row that has a name (`resume`, or a `_ng_rollout_id`) would find the same session each time: so its run itself tries
twice more, under names of their own, and is a failure only if all three are. That one then stays: give the collection
another `name`.
"""

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from polar.bridges.bridge import AsyncBridge
from polar.bridges.rollouts import SessionGroup
from polar.bridges.settings import BridgeSettings, load_settings
from polar.config import SamplingOverrides
from polar.errors import ConfigError
from polar.export.base import SessionItem
from polar.export.nemo_gym import make_response, verify_responses
from polar.records.result import SessionResult
from polar.records.trajectory import Trace
from polar.types import Part, Reasoning, Text, ToolCall

if TYPE_CHECKING:
    from nemo_gym.base_responses_api_agent import SimpleResponsesAPIAgent

Row = Mapping[str, Any]

_MAX_SESSION_ATTEMPTS = 3
"""Sessions of a row that has a name, until one can be trained on."""


class SessionRunner(AsyncBridge):
    """Runs the session of a row and returns its verify response: the agent server without HTTP."""

    def __init__(self, source: BridgeSettings, *, resume: bool = False) -> None:
        """With `resume`, a row with a task and rollout index gets the session that ran for it before. Only for a
        collection with its own `name`, since a trainer's rows repeat their indices in every step. Raises
        ConfigError."""
        super().__init__(source)
        self._resume = resume

    async def run(self, row: Row) -> dict[str, Any]:
        """Raises ConfigError for a row that names no task, and ClientError."""
        task, params = get_task_id(row), dict(row["responses_create_params"])
        for key in self._list_session_keys(row):
            group = await self.rollouts.run_group(task, key, samples=1, sampling=build_sampling_overrides(params))
            if group.items:
                return {**build_verify_response(group.items[0], group.results[0]), "responses_create_params": params}
        return {"responses_create_params": params, **_build_failure_response(group)}

    def _list_session_keys(self, row: Row) -> list[str]:
        """The keys to try for the row's session, in order: made of the trainer's name for the rollout if it has one.
        Without a name every request is a new session."""
        name = self._get_rollout_name(row)
        if name is None:
            return [uuid.uuid4().hex]
        return [name, *(f"{name}.again-{number}" for number in range(1, _MAX_SESSION_ATTEMPTS))]

    def _get_rollout_name(self, row: Row) -> str | None:
        if "_ng_rollout_id" in row:
            return str(row["_ng_rollout_id"])
        if not self._resume:
            return None
        try:
            return f"{row['_ng_task_index']}.{row['_ng_rollout_index']}"
        except KeyError as missing:
            raise ConfigError(f"A row without {missing} can't be resumed: set `resume: false`.") from None


def build_verify_response(item: SessionItem, result: SessionResult) -> dict[str, Any]:
    """A session as the verify response of one run."""
    rows = verify_responses(item, collect_replies(item, result))
    task = item.session.metadata.get("task", item.group_id)
    for row in rows:
        row["polar"]["task"] = task
    best = max(range(len(rows)), key=lambda index: _rank_trace(item.trajectory.traces[index]))
    return {
        **rows[best],
        "polar_others": rows[:best] + rows[best + 1 :],
        "polar_traces": len(rows),
        "polar_share": item.trajectory.traces[best].weight,
    }


def split_traces(run: Row) -> list[dict[str, Any]]:
    """Restores all traces of a session, in order, from its verify response."""
    first_row = {name: value for name, value in run.items() if not name.startswith("polar_")}
    return sorted([first_row, *run["polar_others"]], key=lambda row: int(row["polar"]["trace"]))


def collect_replies(item: SessionItem, result: SessionResult) -> dict[str, list[Part]]:
    """The model's reply in each call, as far as the result's messages can be matched to calls."""
    replies: dict[str, list[Part]] = {}
    for trace, trace_result in zip(item.trajectory.traces, result.trajectory.traces, strict=True):
        assistant_messages = [
            message for message in trace_result.response_messages if message.get("role") == "assistant"
        ]
        if len(assistant_messages) == len(trace.spans):  # not so if the harness rewrote its history
            replies |= {
                span.exchange_id: _to_parts(one) for span, one in zip(trace.spans, assistant_messages, strict=True)
            }
    return replies


def agent_class() -> "type[SimpleResponsesAPIAgent]":
    """Creates the agent server's class, for an `app.py`."""
    from fastapi import FastAPI
    from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
    from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
    from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
    from pydantic import ConfigDict, PrivateAttr

    class PolarAgentConfig(BaseResponsesAPIAgentConfig):
        polar: dict[str, Any] | str | None = None  # as `polar.bridges.settings` takes it
        resume: bool = False  # as `SessionRunner` has it
        engines: list[str] | str | None = None  # `${policy_base_url}`: NeMo RL's own engines are Polar's
        version: int = 0  # of the engines' weights at the start

    class RunRequest(BaseRunRequest):
        model_config = ConfigDict(extra="allow")

    class VerifyResponse(BaseVerifyResponse):
        model_config = ConfigDict(extra="allow")

    class PolarAgent(SimpleResponsesAPIAgent):
        config: PolarAgentConfig
        _runs: SessionRunner = PrivateAttr()

        def setup_webserver(self) -> FastAPI:
            self._runs = SessionRunner(load_settings(self.config.polar), resume=self.config.resume)
            app = super().setup_webserver()
            base_lifespan = app.router.lifespan_context

            @asynccontextmanager
            async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
                engines = self.config.engines
                try:
                    if engines:
                        urls = [engines] if isinstance(engines, str) else engines
                        await self._runs.engines.attach(urls, self.config.version)
                    async with base_lifespan(app) as state:
                        yield state
                finally:
                    await self._runs.close()

            app.router.lifespan_context = lifespan
            return app

        async def run(self, body: RunRequest) -> VerifyResponse:
            row = body.model_dump(exclude_unset=True)
            return VerifyResponse.model_validate(await self._runs.run(row))

        async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming) -> NeMoGymResponse:
            """The same without a reward: the task is named in `metadata`."""
            params = body.model_dump(exclude_unset=True)
            row = {**(params.get("metadata") or {}), "responses_create_params": params}
            return NeMoGymResponse.model_validate((await self._runs.run(row))["response"])

    return PolarAgent


def get_task_id(row: Row) -> str:
    task_id = row.get("task_id")
    if not isinstance(task_id, str):
        raise ConfigError(f"A row of data names its task as `task_id`, a string: this one has {sorted(row)}.")
    return task_id


def build_sampling_overrides(params: Row) -> SamplingOverrides:
    """The sampling overrides of a response's parameters."""
    return SamplingOverrides(
        temperature=params.get("temperature"), top_p=params.get("top_p"), max_tokens=params.get("max_output_tokens")
    )


def _build_failure_response(group: SessionGroup) -> dict[str, Any]:
    reason = next(iter(group.left_out), "no_results")  # a task that was cancelled may have none
    return {
        "response": make_response(f"resp_{group.name}", 0.0, "polar", [], complete=False),
        "reward": 0.0,
        "polar": {"task": group.task, "task_id": group.name, "reason": reason},
        "_ng_failure_class": reason,
    }


def _rank_trace(trace: Trace) -> tuple[bool, float]:
    return trace.role == "main", trace.weight


def _to_parts(message: Row) -> list[Part]:
    """The parts of a message in OpenAI's chat format."""
    parts: list[Part] = []
    if thought := message.get("reasoning_content"):
        parts.append(Reasoning(thought))
    if isinstance(text := message.get("content"), str) and text:
        parts.append(Text(text))
    for call in message.get("tool_calls") or []:
        function = call.get("function") or call.get("custom") or {}
        arguments = function.get("arguments", function.get("input", ""))
        parts.append(ToolCall(call["id"], function["name"], arguments))
    return parts
