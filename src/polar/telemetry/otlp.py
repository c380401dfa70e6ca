"""Traces by OpenTelemetry, named as its conventions for generative AI name things. The extra `otel`.

    invoke_agent NAME                    a session
      INIT  READY  RUN  POSTRUN          its stages
      chat MODEL                         each model call

No span has what was said: neither messages nor errors' texts. Spans are sent by a thread of the exporter's own, in
batches; where the collector can't keep up they are dropped, and nobody waits.
"""

import asyncio
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from polar.store.base import Exchange, Verdict, is_suspicious
from polar.telemetry.tracing import SessionSpan, Traced, Tracing
from polar.types import Request

_NANO = 1_000_000_000
_PATIENCE = 3.0  # seconds for what is left to be sent, when all else has ended


def exporter_to(endpoint: str, headers: Mapping[str, str]) -> SpanExporter:
    """`endpoint` as collectors tell it (http://HOST:4318), or with the path of their traces."""
    path = "/v1/traces"
    address = endpoint.rstrip("/")
    return OTLPSpanExporter(address if address.endswith(path) else address + path, headers=dict(headers))


class OpenTelemetry(Tracing):
    def __init__(self, exporter: SpanExporter, provider: str) -> None:
        resource = Resource.create({SERVICE_NAME: "polar"})
        self._exporter = exporter
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._traces.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._traces.get_tracer("polar")
        self._provider = provider
        self._sessions: dict[str, Span] = {}

    def session(self, session: Traced) -> SessionSpan:
        span = self._tracer.start_span(
            f"invoke_agent {session.agent}",
            kind=SpanKind.CLIENT,
            attributes={
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": self._provider,
                "gen_ai.request.model": session.model,
                "gen_ai.agent.name": session.agent,
                "gen_ai.conversation.id": session.session_id,
                "polar.task_id": session.task_id,
                "polar.sample": session.sample,
                "polar.run": session.run,
                "polar.node_id": session.node_id,
            },
        )
        self._sessions[session.session_id] = span
        return _Session(self, session.session_id, span, self._tracer)

    def call(self, exchange: Exchange, request: Request, *, served: list[str], error: str | None) -> None:
        session = self._sessions.get(exchange.session_id)
        operation = "chat" if request.prompt is None else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {request.model}",
            context=None if session is None else set_span_in_context(session),
            kind=SpanKind.CLIENT,
            start_time=int(exchange.started_at * _NANO),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": self._provider,
                **_asked(exchange, request),
                **_answered(exchange, request, served),
                **_ours(exchange),
                **_server(exchange.replica),
            },
        )
        if error is not None:
            _failed(span, error)
        span.end(int(exchange.ended_at * _NANO))

    def forget(self, session_id: str) -> None:
        del self._sessions[session_id]

    async def close(self) -> None:
        """Sends what is left, as far as the collector takes it in time."""
        closing = asyncio.ensure_future(asyncio.to_thread(self._traces.shutdown))
        await asyncio.wait({closing}, timeout=_PATIENCE)
        if not closing.done():
            await asyncio.to_thread(self._exporter.shutdown)  # it tries no more
        await closing


class _Session(SessionSpan):
    def __init__(self, traces: OpenTelemetry, session_id: str, span: Span, tracer: Tracer) -> None:
        self._traces = traces
        self._session_id = session_id
        self._span = span
        self._tracer = tracer
        self._stage: Span | None = None

    def stage(self, name: str | None) -> None:
        if self._stage is not None:
            self._stage.end()
        self._stage = None
        if name is not None:
            self._stage = self._tracer.start_span(name.upper(), set_span_in_context(self._span))

    def end(self, verdict: Verdict, *, turns: int, tokens: int) -> None:
        self.stage(None)
        self._traces.forget(self._session_id)
        self._span.set_attribute("polar.turns", turns)
        self._span.set_attribute("gen_ai.usage.output_tokens", tokens)
        if verdict.reward is not None:
            self._span.set_attribute("polar.reward", verdict.reward)
        if verdict.evidence:
            self._span.set_attribute("polar.suspicious", is_suspicious(verdict.evidence))
        if verdict.reason is not None:
            _failed(self._span, verdict.reason)
        self._span.end()


def _asked(exchange: Exchange, request: Request) -> dict[str, str | bool | int | float]:
    sampling = exchange.sampling
    wanted = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
    }
    return {
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": request.stream,
        "gen_ai.conversation.id": exchange.session_id,
        **{name: value for name, value in wanted.items() if value is not None},
    }


def _answered(exchange: Exchange, request: Request, served: list[str]) -> dict[str, str | int | float | list[str]]:
    usage = exchange.usage
    told: dict[str, str | int | float | list[str]] = {
        "gen_ai.response.id": exchange.exchange_id,
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.output_tokens": usage.completion,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning,
    }
    if served:
        told["gen_ai.response.model"] = request.model if request.model in served else served[0]
    if exchange.finish_reason is not None:
        told["gen_ai.response.finish_reasons"] = [exchange.finish_reason]
    if exchange.first_token_at is not None:
        told["gen_ai.response.time_to_first_chunk"] = max(0.0, exchange.first_token_at - exchange.started_at)
    return told


def _ours(exchange: Exchange) -> dict[str, str | int]:
    told: dict[str, str | int] = {
        "polar.dialect": exchange.dialect,
        "polar.status": exchange.status,
        "polar.continuation": exchange.continuation,
    }
    if exchange.branch_reason is not None:
        told["polar.branch_reason"] = exchange.branch_reason
    if exchange.untrainable is not None:
        told["polar.untrainable"] = exchange.untrainable
    if exchange.versions:
        told["polar.policy_version"] = exchange.versions[-1].version
    return told


def _server(url: str) -> dict[str, str | int]:
    parts = urlsplit(url)
    if parts.hostname is None:
        return {}
    return {"server.address": parts.hostname, "server.port": parts.port or (443 if parts.scheme == "https" else 80)}


def _failed(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))
