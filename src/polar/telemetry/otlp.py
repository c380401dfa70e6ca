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

from polar.records.exchange import Exchange
from polar.records.session import Verdict, is_suspicious
from polar.telemetry.tracing import SessionAttributes, SessionSpan, Tracing
from polar.types import Request

_NANOSECONDS_PER_SECOND = 1_000_000_000
_FLUSH_SECONDS = 3.0  # seconds for what is left to be sent, when all else has ended


def make_exporter(endpoint: str, headers: Mapping[str, str]) -> SpanExporter:
    """`endpoint` as collectors tell it (http://HOST:4318), or with the path of their traces."""
    path = "/v1/traces"
    address = endpoint.rstrip("/")
    return OTLPSpanExporter(address if address.endswith(path) else address + path, headers=dict(headers))


class OpenTelemetry(Tracing):
    def __init__(self, exporter: SpanExporter, provider: str) -> None:
        resource = Resource.create({SERVICE_NAME: "polar"})
        self._exporter = exporter
        self._tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracer_provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._tracer_provider.get_tracer("polar")
        self._provider = provider
        self._session_spans: dict[str, Span] = {}

    def start_session(self, attributes: SessionAttributes) -> SessionSpan:
        span = self._tracer.start_span(
            f"invoke_agent {attributes.agent}",
            kind=SpanKind.CLIENT,
            attributes={
                "gen_ai.operation.name": "invoke_agent",
                "gen_ai.provider.name": self._provider,
                "gen_ai.request.model": attributes.model,
                "gen_ai.agent.name": attributes.agent,
                "gen_ai.conversation.id": attributes.session_id,
                "polar.task_id": attributes.task_id,
                "polar.sample": attributes.sample,
                "polar.run": attributes.run,
                "polar.node_id": attributes.node_id,
            },
        )
        self._session_spans[attributes.session_id] = span
        return _ExportedSessionSpan(self, attributes.session_id, span, self._tracer)

    def record_call(self, exchange: Exchange, request: Request, *, served: list[str], error: str | None) -> None:
        session = self._session_spans.get(exchange.session_id)
        operation = "chat" if request.prompt is None else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {request.model}",
            context=None if session is None else set_span_in_context(session),
            kind=SpanKind.CLIENT,
            start_time=int(exchange.started_at * _NANOSECONDS_PER_SECOND),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": self._provider,
                **_build_request_attributes(exchange, request),
                **_build_response_attributes(exchange, request, served),
                **_build_polar_attributes(exchange),
                **_build_server_attributes(exchange.replica),
            },
        )
        if error is not None:
            _mark_failed(span, error)
        span.end(int(exchange.ended_at * _NANOSECONDS_PER_SECOND))

    def drop_session(self, session_id: str) -> None:
        del self._session_spans[session_id]

    async def close(self) -> None:
        """Sends what is left, as far as the collector takes it in time."""
        closing = asyncio.ensure_future(asyncio.to_thread(self._tracer_provider.shutdown))
        await asyncio.wait({closing}, timeout=_FLUSH_SECONDS)
        if not closing.done():
            await asyncio.to_thread(self._exporter.shutdown)  # it tries no more
        await closing


class _ExportedSessionSpan(SessionSpan):
    def __init__(self, traces: OpenTelemetry, session_id: str, span: Span, tracer: Tracer) -> None:
        self._telemetry = traces
        self._session_id = session_id
        self._span = span
        self._tracer = tracer
        self._stage_span: Span | None = None

    def enter_stage(self, name: str | None) -> None:
        if self._stage_span is not None:
            self._stage_span.end()
        self._stage_span = None
        if name is not None:
            self._stage_span = self._tracer.start_span(name.upper(), set_span_in_context(self._span))

    def end(self, verdict: Verdict, *, turns: int, tokens: int) -> None:
        self.enter_stage(None)
        self._telemetry.drop_session(self._session_id)
        self._span.set_attribute("polar.turns", turns)
        self._span.set_attribute("gen_ai.usage.output_tokens", tokens)
        if verdict.reward is not None:
            self._span.set_attribute("polar.reward", verdict.reward)
        if verdict.evidence:
            self._span.set_attribute("polar.suspicious", is_suspicious(verdict.evidence))
        if verdict.reason is not None:
            _mark_failed(self._span, verdict.reason)
        self._span.end()


def _build_request_attributes(exchange: Exchange, request: Request) -> dict[str, str | bool | int | float]:
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


def _build_response_attributes(
    exchange: Exchange, request: Request, served: list[str]
) -> dict[str, str | int | float | list[str]]:
    usage = exchange.usage
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.response.id": exchange.exchange_id,
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.output_tokens": usage.completion,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning,
    }
    if served:
        attributes["gen_ai.response.model"] = request.model if request.model in served else served[0]
    if exchange.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [exchange.finish_reason]
    if exchange.first_token_at is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = max(0.0, exchange.first_token_at - exchange.started_at)
    return attributes


def _build_polar_attributes(exchange: Exchange) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "polar.dialect": exchange.dialect,
        "polar.status": exchange.status,
        "polar.continuation": exchange.continuation,
    }
    if exchange.branch_reason is not None:
        attributes["polar.branch_reason"] = exchange.branch_reason
    if exchange.untrainable is not None:
        attributes["polar.untrainable"] = exchange.untrainable
    if exchange.versions:
        attributes["polar.policy_version"] = exchange.versions[-1].version
    return attributes


def _build_server_attributes(url: str) -> dict[str, str | int]:
    parts = urlsplit(url)
    if parts.hostname is None:
        return {}
    return {"server.address": parts.hostname, "server.port": parts.port or (443 if parts.scheme == "https" else 80)}


def _mark_failed(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))
