"""A collector of traces: it takes what comes over OTLP/HTTP, and reads it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    def __init__(self) -> None:
        self.url = ""
        self.headers: list[dict[str, str]] = []
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Span] = []

    async def take(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        sent = ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            self.resources.append(dict(_read(resource.resource.attributes)))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(content_type="application/x-protobuf")

    def named(self, name: str) -> Span:
        (found,) = [span for span in self.spans if span.name == name]
        return found


def attributes(span: Span) -> dict[str, Any]:
    return dict(_read(span.attributes))


def _read(attributes: Any) -> Iterator[tuple[str, Any]]:
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        yield attribute.key, [one.string_value for one in value.values] if kind == "array_value" else value


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    it = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", it.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    it.url = f"http://{host}:{port}"
    try:
        yield it
    finally:
        await runner.cleanup()
