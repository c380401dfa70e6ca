"""Spans: what they are called, what they tell, and that nothing happens where nobody collects them."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SentSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.trace import SpanKind, StatusCode

from polar.errors import ConfigError
from polar.records.exchange import VersionSpan
from polar.records.session import Verdict
from polar.telemetry import tracing
from polar.telemetry.otlp import OpenTelemetry
from polar.telemetry.tracing import SessionAttributes
from polar.types import Request, SamplingParams, Usage
from tests.unit.telemetry.collector import attributes, collector
from tests.unit.telemetry.test_gateway_metrics import exchange

SESSION = SessionAttributes(session_id="s", task_id="t", sample=2, run="r", node_id="n", agent="pi", model="m")


def asked(**fields: Any) -> Request:
    return Request(**{"model": "asked-for", "messages": [], "stream": True, **fields})


class Memory:
    """Spans are seen as soon as `all` has sent them."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        self.traces = OpenTelemetry(self._kept, "vllm")

    async def all(self) -> dict[str, Any]:
        await self.traces.close()
        return {span.name: span for span in self._kept.get_finished_spans()}


async def test_a_session_with_its_stages_and_calls() -> None:
    memory = Memory()
    session = memory.traces.start_session(SESSION)
    for stage in ("init", "ready", "run", "postrun"):
        session.enter_stage(stage)
        if stage == "run":
            memory.traces.record_call(exchange(), asked(), served=["served"], error=None)
    session.enter_stage(None)
    session.end(Verdict(0.5), turns=1, tokens=3)
    spans = await memory.all()
    assert list(spans) == ["INIT", "READY", "chat asked-for", "RUN", "POSTRUN", "invoke_agent pi"]
    whole = spans["invoke_agent pi"]
    assert whole.parent is None
    for name, span in spans.items():
        assert span is whole or span.parent.span_id == whole.context.span_id, name
    assert whole.kind == SpanKind.CLIENT
    assert whole.attributes == {
        gen_ai.GEN_AI_OPERATION_NAME: "invoke_agent",
        gen_ai.GEN_AI_PROVIDER_NAME: "vllm",
        gen_ai.GEN_AI_REQUEST_MODEL: "m",
        gen_ai.GEN_AI_AGENT_NAME: "pi",
        gen_ai.GEN_AI_CONVERSATION_ID: "s",
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: 3,
        "polar.task_id": "t",
        "polar.sample": 2,
        "polar.run": "r",
        "polar.node_id": "n",
        "polar.turns": 1,
        "polar.reward": 0.5,
    }
    assert whole.status.status_code == StatusCode.UNSET


async def test_a_call_is_told_by_the_conventions_names() -> None:
    memory = Memory()
    made = exchange(
        sampling=SamplingParams(temperature=0.7, max_tokens=100),
        first_token_at=10.5,
        finish_reason="tool_calls",
        usage=Usage(prompt=40, completion=9, cached=30, reasoning=4),
        replica="http://me:secret@engine.example:8000",
        branch_reason="text_changed",
        untrainable="aborted",
        versions=[VersionSpan(3, 0, 5), VersionSpan(4, 5, 9)],
        continuation="recorded",
    )
    memory.traces.record_call(made, asked(), served=["served"], error=None)
    span = (await memory.all())["chat asked-for"]
    assert span.parent is None  # of a session that was made by hand
    assert span.kind == SpanKind.CLIENT
    assert (span.start_time, span.end_time) == (10_000_000_000, 12_000_000_000)
    assert span.attributes == {
        gen_ai.GEN_AI_OPERATION_NAME: "chat",
        gen_ai.GEN_AI_PROVIDER_NAME: "vllm",
        gen_ai.GEN_AI_CONVERSATION_ID: "s",
        gen_ai.GEN_AI_REQUEST_MODEL: "asked-for",
        gen_ai.GEN_AI_REQUEST_STREAM: True,
        gen_ai.GEN_AI_REQUEST_TEMPERATURE: 0.7,
        gen_ai.GEN_AI_REQUEST_MAX_TOKENS: 100,
        gen_ai.GEN_AI_RESPONSE_ID: "x",
        gen_ai.GEN_AI_RESPONSE_MODEL: "served",
        gen_ai.GEN_AI_RESPONSE_FINISH_REASONS: ("tool_calls",),
        gen_ai.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: 0.5,
        gen_ai.GEN_AI_USAGE_INPUT_TOKENS: 40,
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: 9,
        gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 30,
        gen_ai.GEN_AI_USAGE_REASONING_OUTPUT_TOKENS: 4,
        server_attributes.SERVER_ADDRESS: "engine.example",
        server_attributes.SERVER_PORT: 8000,
        "polar.dialect": "d",
        "polar.status": "complete",
        "polar.continuation": "recorded",
        "polar.branch_reason": "text_changed",
        "polar.untrainable": "aborted",
        "polar.policy_version": 4,
    }


async def test_failures_are_told_by_their_kind_alone() -> None:
    memory = Memory()
    session = memory.traces.start_session(SESSION)
    session.enter_stage("run")
    memory.traces.record_call(
        exchange(status="failed", error="the engine said: secret words"), asked(), served=[], error="engine"
    )
    session.end(Verdict(reason="engine_failed"), turns=1, tokens=0)
    spans = await memory.all()
    for name, kind in (("chat asked-for", "engine"), ("invoke_agent pi", "engine_failed")):
        assert spans[name].status.status_code == StatusCode.ERROR
        assert spans[name].status.description is None
        assert spans[name].attributes[error_attributes.ERROR_TYPE] == kind
        assert "secret" not in spans[name].to_json()
    assert gen_ai.GEN_AI_RESPONSE_MODEL not in spans["chat asked-for"].attributes
    assert server_attributes.SERVER_ADDRESS not in spans["chat asked-for"].attributes
    assert spans["RUN"].end_time is not None  # it was cut short, and is told nevertheless


async def test_the_model_that_answers() -> None:
    memory = Memory()
    memory.traces.record_call(exchange(), asked(model="a"), served=["b", "a"], error=None)
    memory.traces.record_call(exchange(), asked(model="c", prompt="once"), served=["b", "a"], error=None)
    spans = await memory.all()
    assert spans["chat a"].attributes[gen_ai.GEN_AI_RESPONSE_MODEL] == "a"
    assert spans["text_completion c"].attributes[gen_ai.GEN_AI_RESPONSE_MODEL] == "b"


async def test_a_collector_gets_them_over_http() -> None:
    async with collector() as it:
        async with tracing.export_traces(it.url, provider="vllm", headers={"x-token": "abc"}):
            session = tracing.current().start_session(SESSION)
            session.enter_stage("run")
            tracing.current().record_call(exchange(), asked(), served=[], error=None)
            session.end(Verdict(1.0), turns=1, tokens=3)
        assert {span.name for span in it.spans} == {"invoke_agent pi", "RUN", "chat asked-for"}
        assert {headers["x-token"] for headers in it.headers} == {"abc"}
        assert it.resources[0]["service.name"] == "polar"
        whole, call = it.named("invoke_agent pi"), it.named("chat asked-for")
        assert (call.trace_id, call.parent_span_id) == (whole.trace_id, whole.span_id)
        assert whole.kind == SentSpan.SpanKind.SPAN_KIND_CLIENT
        assert attributes(whole)["gen_ai.agent.name"] == "pi"
        assert attributes(whole)["polar.reward"] == 1.0


async def test_an_endpoint_may_have_the_path_of_its_traces() -> None:
    async with collector() as it:
        async with tracing.export_traces(f"{it.url}/v1/traces", provider="vllm"):
            tracing.current().record_call(exchange(), asked(), served=[], error=None)
        assert [span.name for span in it.spans] == ["chat asked-for"]


async def test_a_collector_that_is_not_there_holds_nobody_up(unused_tcp_port: int) -> None:
    async with tracing.export_traces(f"http://127.0.0.1:{unused_tcp_port}", provider="vllm"):
        for _ in range(10_000):
            tracing.current().record_call(exchange(), asked(), served=[], error=None)


async def test_nobody_is_told_where_nobody_collects() -> None:
    before = tracing.current()
    assert type(before) is tracing.Tracing
    async with tracing.export_traces(None, provider="vllm"):
        assert tracing.current() is before
        session = tracing.current().start_session(SESSION)
        session.enter_stage("init")
        session.end(Verdict(), turns=0, tokens=0)
    async with collector() as it, tracing.export_traces(it.url, provider="vllm"):
        assert tracing.current() is not before
    assert tracing.current() is before


async def test_what_is_off_is_not_imported() -> None:
    code = (
        "import sys, polar.service, polar.node.session_run, polar.telemetry.tracing\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    found = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


async def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polar.telemetry.otlp", None)
    with pytest.raises(ConfigError, match=r"polar-rl\[otel\]"):
        async with tracing.export_traces("http://127.0.0.1:4318", provider="vllm"):
            pass
