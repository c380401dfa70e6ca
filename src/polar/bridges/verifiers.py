"""verifiers (0.4, its `v1` API) and prime-rl, which trains on it: an environment whose rollouts are sessions of Polar.

A module of your own on the path, `polar_tasks.py`, has the plug-in's three classes, and its name is the taskset's id:

    from polar.bridges.verifiers import plugin

    PolarTaskset, PolarEnv, PolarHarness = plugin({"name": "first", "tasks": ["tasks.jsonl"]})
    __all__ = ["PolarTaskset", "PolarEnv", "PolarHarness"]

    $ vf-eval polar-tasks -r 8                       # prime-rl: [[orchestrator.train.env]] taskset.id = "polar-tasks"

A task of the taskset is one of Polar's. An episode is a session, and its one trace has a branch for each of Polar's:
all of them train. Polar has the harness, the sandbox and the calls to the engine, so verifiers' own interception sees
none of them; of its sampling, `temperature`, `top_p` and `max_tokens` count, and its client is not asked.

Who divides: prime-rl, by the batch's tokens that train: splitting a session changes nothing, and `weight` is not
applied. Advantages go by episode, which is a session: prime-rl's own algorithms are right as they are.

What is left out: policy versions, which a node has no field for; they are in `trace.info["polar"]`. All tokens stand on
sampled nodes, those of their context before them, as a call has them: who weighs observations by message (prime-rl's
`echo`) finds no tokens there. A session without a reward is a failed rollout, with the reason. Retries are new
sessions: an episode's id is its key.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from polar.bridges.bridge import AsyncBridge
from polar.bridges.settings import SettingsSource, load_settings
from polar.client.submission import load_tasks
from polar.config import SamplingOverrides
from polar.export.base import SessionItem, require_logprobs, trace_metadata, trace_token_ids
from polar.records.result import SessionResult, TraceResult
from polar.records.trajectory import Trace

ChatMessage = Mapping[str, Any]
"""A message in OpenAI's chat format."""


class VerifiersClasses(NamedTuple):
    """The classes that verifiers looks for in a plug-in module."""

    taskset: type
    env: type
    harness: type


def plugin(source: SettingsSource = None) -> VerifiersClasses:
    """Creates verifiers' classes for Polar's sessions. `source` is as in `polar.bridges.settings`. Raises
    ConfigError."""
    import verifiers.v1 as vf
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import ModelCall

    settings = load_settings(source)
    serving_bridge: ContextVar[AsyncBridge] = ContextVar("serving")  # the bridge of the current episode's environment

    class PolarTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
        @property
        def key(self) -> str:
            return str(self.data.id)

        @vf.reward  # type: ignore[untyped-decorator]
        async def earned(self, trace: vf.Trace) -> float:
            return float(trace.info["polar"]["reward"])

    class PolarTaskset(vf.Taskset[PolarTask, vf.TasksetConfig]):
        def load(self) -> Iterator[PolarTask]:
            for task in load_tasks(settings.tasks, run=settings.run):
                yield PolarTask(vf.TaskData(id=task.task_id, prompt=task.instruction), self.config.task)

    class PolarEnvConfig(vf.EnvConfig):
        agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())  # nothing runs in it

    class PolarEnv(vf.Env[PolarEnvConfig]):
        _bridge: AsyncBridge | None = None  # while it is served

        async def run(self, task: Any, agents: Any) -> None:
            assert self._bridge is not None
            serving_bridge.set(self._bridge)
            await agents.agent.run(task)

        async def start(self) -> None:
            self._bridge = AsyncBridge(settings)

        async def stop(self) -> None:
            bridge, self._bridge = self._bridge, None
            if bridge is not None:
                await bridge.close()

    class PolarHarness(vf.Harness[vf.HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = True
        EXECUTES_CODE = False  # not here: Polar's runtimes have the agent
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            del runtime, endpoint, secret, mcp_urls  # Polar has its own
            if (bridge := serving_bridge.get(None)) is None:
                raise vf.HarnessError("Polar's harness runs in Polar's environment only: name no other `env`.")
            sampling = _build_sampling(ctx.sampling)
            group = await bridge.rollouts.run_group(data.id, trace.id, samples=1, sampling=sampling)
            if not group.items:
                reason = next(iter(group.left_out), "no_results")  # a task that was cancelled may have none
                raise vf.HarnessError(f"Polar's session {group.name} can't be trained on: {reason}.")
            (item,), (result,) = group.items, group.results
            for node_index, node in enumerate(build_nodes(item, result)):
                trace.nodes.append(MessageNode.model_validate(node))
                if call := node.get("call"):
                    trace.calls.append(ModelCall(node=node_index, model=ctx.model, **call))
            trace.info["polar"] = build_info(item)
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    return VerifiersClasses(PolarTaskset, PolarEnv, PolarHarness)


def build_nodes(item: SessionItem, result: SessionResult) -> list[dict[str, Any]]:
    """A session as the fields of verifiers' message nodes: a chain from a root of its own for each trace. Those that
    were sampled have a `call` besides, as the fields of its model calls."""
    nodes: list[dict[str, Any]] = []
    for trace, trace_result in zip(item.trajectory.traces, result.trajectory.traces, strict=True):
        nodes += _build_chain(trace, trace_result, first=len(nodes))
    return nodes


def build_info(item: SessionItem) -> dict[str, Any]:
    """What nodes have no field for."""
    return {
        "session_id": item.session.session_id,
        "reward": item.session.reward,
        "traces": [trace_metadata(item, index, trace) for index, trace in enumerate(item.trajectory.traces)],
    }


def _build_chain(trace: Trace, result: TraceResult, *, first: int) -> list[dict[str, Any]]:
    ids, recorded, begin = trace_token_ids(trace), require_logprobs(trace.logprobs), len(trace.prompt_ids)
    chain: list[dict[str, Any]] = []

    def add(message: dict[str, Any], **fields: Any) -> None:
        parent = first + len(chain) - 1 if chain else None
        chain.append({"parent": parent, "message": message, "sampled": False, **fields})

    seen = 0
    for span, (before, reply) in zip(trace.spans, _split_turns(result, len(trace.spans)), strict=True):
        for one in before:
            add(_to_message(one))
        context, sampled = ids[seen : begin + span.start], ids[begin + span.start : begin + span.stop]
        add(
            _to_message(reply),
            sampled=True,
            token_ids=[*context.tolist(), *sampled.tolist()],
            mask=[False] * len(context) + [True] * len(sampled),
            logprobs=recorded[span.start : span.stop].tolist(),
            call={"usage": {"prompt_tokens": begin + span.start, "completion_tokens": len(sampled)}},
        )
        seen = begin + span.stop
    if trace.finish_reason in ("stop", "length", "tool_calls"):  # of the last call
        chain[-1]["call"]["finish_reason"] = trace.finish_reason
    return chain


def _split_turns(result: TraceResult, calls: int) -> list[tuple[list[ChatMessage], ChatMessage]]:
    """The messages before each call and its reply, as far as they are known."""
    turns: list[tuple[list[ChatMessage], ChatMessage]] = []
    before: list[ChatMessage] = list(result.prompt_messages)
    for message in result.response_messages:
        if message["role"] == "assistant":
            turns.append((before, message))
            before = []
        else:
            before.append(message)
    if len(turns) != calls:  # a harness rewrote its history on the way
        return [([], {"role": "assistant", "content": ""})] * calls
    return turns


def _to_message(chat: ChatMessage) -> dict[str, Any]:
    """As verifiers has it."""
    content = chat.get("content")
    match chat["role"]:
        case "assistant":
            calls = [_to_tool_call(call) for call in chat.get("tool_calls") or []]
            thought = chat.get("reasoning_content")
            return {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": calls or None}
        case "tool":
            return {"role": "tool", "tool_call_id": chat.get("tool_call_id", ""), "content": _to_content(content)}
        case "user":
            return {"role": "user", "content": _to_content(content)}
        case _:
            return {"role": "system", "content": _to_content(content)}


def _to_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    kind = call.get("type", "function")
    function = call[kind]
    arguments = function.get("arguments", function.get("input"))
    return {"id": call["id"], "type": kind, "name": function["name"], "arguments": arguments}


def _to_content(content: str | Sequence[Mapping[str, Any]] | None) -> Any:
    """Text and pictures: verifiers has no other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return [part for part in content if part.get("type") in ("text", "image_url")]


def _build_sampling(params: Any) -> SamplingOverrides:
    return SamplingOverrides(temperature=params.temperature, top_p=params.top_p, max_tokens=params.max_tokens)
