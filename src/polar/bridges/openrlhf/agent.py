"""OpenRLHF's agent: an executor whose samples are Polar's sessions, and the server of its engine.

OpenRLHF loads this file by its path, and takes its `AgentExecutor`.
"""

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from polar.bridges.rollouts import (
    SessionGroup,
    build_sampling_overrides,
    check_temperature,
    get_shared_groups,
    has_failed,
)
from polar.bridges.settings import SettingsSource, load_settings
from polar.dialects import sse
from polar.engines.api_server import wire
from polar.errors import ConfigError
from polar.export.openrlhf import OpenRlhfExporter

_JSON = "application/json"
_MAX_BODY_BYTES = 256 * 1024 * 1024
_encode = msgspec.json.Encoder().encode


class GroupLabel(Struct, frozen=True):
    """The group that the trainer requests from the executor, in place of the row's label."""

    task: str
    key: str
    samples: int
    version: int
    is_training: bool


def make_agent_executor(source: SettingsSource = None, *, serves_engine: bool = True) -> type[Any]:
    """Creates the class that OpenRLHF expects in an agent file. With `serves_engine` it gives its engine to Polar."""
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
            # The trainer computes log-probabilities at its own temperature, so sampling must use the same.
            temperature = sampling_params.temperature
            sampling = build_sampling_overrides(
                temperature=temperature, top_p=sampling_params.top_p, top_k=sampling_params.top_k
            )
            groups = get_shared_groups(self._settings)
            group, session_index = await groups.claim_session(label.task, label.key, label.samples, sampling)
            logprobs = sampling_params.logprobs is not None
            if label.is_training and logprobs:
                check_temperature(group.items[session_index : session_index + 1], temperature)
            return _build_response(prompt, group, session_index, logprobs=logprobs)

        async def _serve(self, engine: Any, context: int, version: int) -> None:
            url = await EngineServer(engine, context).start()
            await get_shared_groups(self._settings).rollouts.client.add_engine(url, version)

    return AgentExecutor


def __getattr__(name: str) -> Any:
    """OpenRLHF loads this file as an agent file and looks for its class."""
    if name == "AgentExecutor":
        from polar.bridges.openrlhf import (
            agent,
        )  # under its package name, so that the trainer's labels have the same class

        return agent.make_agent_executor()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _build_response(prompt: str, group: SessionGroup, session_index: int, *, logprobs: bool) -> dict[str, Any]:
    """One session as an executor's result: its last trace, and all of them as `traces`."""
    if session_index >= len(group.items):  # it was left out
        # OpenRLHF filters groups by their mean, which this leaves as it is; advantages are without it (see
        # `trainer.py`).
        mean_reward = sum(group.rewards) / len(group.rewards) if group.rewards else 0.0
        return _build_empty_response(prompt, group.task, mean_reward, logprobs=logprobs)
    rows = [
        row | {"prompt": prompt, "label": group.task}
        for row in OpenRlhfExporter().build_lines(group.items[session_index])
    ]
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


# The executor's engine, where Polar can reach it: the part of vLLM's HTTP API that takes token ids and gives them back


class _CompletionRequest(Struct):
    """A completion request. Sampling fields have the names of vLLM's SamplingParams."""

    prompt: list[int]
    model: str = ""
    stream: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = False
    logprobs: int | None = None


_decode_request = msgspec.json.Decoder(_CompletionRequest).decode
_NON_SAMPLING_FIELDS = ("prompt", "model", "stream", "logprobs")


class EngineServer:
    """An HTTP server for OpenRLHF's engine, in the engine's event loop."""

    def __init__(self, engine: Any, context_length: int, *, host: str | None = None) -> None:
        """`engine` is OpenRLHF's: it has `generate(ids, sampling_params)`. `context_length` is its longest sequence.
        `host`: where to listen [default: this node's address in the Ray cluster]."""
        self._engine = engine
        self._context_length = context_length
        self._host = host
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Starts the server and returns its address."""
        if self._host is None:
            import ray

            self._host = ray.util.get_node_ip_address()
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._completions)])
        # A disconnecting client cancels its handler, which aborts the generation.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        card = wire.ModelCard("policy", 0, "", self._context_length)
        return web.Response(body=_encode(wire.ModelList([card])), content_type=_JSON)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        from vllm import SamplingParams

        try:
            completion = _decode_request(await request.read())
            sampling_fields = {
                name: getattr(completion, name)
                for name in completion.__struct_fields__
                if name not in _NON_SAMPLING_FIELDS
            }
            params = SamplingParams(**sampling_fields, logprobs=max(completion.logprobs or 0, 1))
            output = (await self._engine.generate(completion.prompt, params)).outputs[0]
        except ValueError as error:  # vLLM rejects the parameters
            refusal = {"error": {"message": str(error), "type": "BadRequestError", "code": 400}}
            return web.Response(status=400, body=_encode(refusal), content_type=_JSON)
        reply = wire.CompletionReply("cmpl", 0, completion.model, [_build_choice(completion, output)])
        sampled_tokens = len(output.token_ids)
        reply.usage = wire.UsageInfo(len(completion.prompt), len(completion.prompt) + sampled_tokens, sampled_tokens)
        if not completion.stream:
            return web.Response(body=_encode(reply), content_type=_JSON)
        events = sse.encode_event(_encode(reply)) + sse.encode_event(b"[DONE]")
        return web.Response(body=events, content_type="text/event-stream")


def _build_choice(completion: _CompletionRequest, output: Any) -> wire.CompletionChoice:
    ids = list(output.token_ids)
    logprobs = [candidates[id].logprob for candidates, id in zip(output.logprobs or [], ids, strict=False)]
    return wire.CompletionChoice(
        0,
        output.text,
        wire.CompletionLogprobs(token_logprobs=logprobs, tokens=["" for _ in ids]),
        output.finish_reason,
        output.stop_reason,
        token_ids=ids,
        prompt_token_ids=completion.prompt,
    )
