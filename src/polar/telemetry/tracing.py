"""Spans of sessions and their model calls, for whoever collects traces.

What is traced tells `current()` of it. Unless somebody collects (`exporting`), that is an object that does nothing, and
nothing of OpenTelemetry is imported.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

from msgspec import Struct

from polar.distribution import install_hint
from polar.errors import ConfigError
from polar.records.exchange import Exchange
from polar.records.session import Verdict
from polar.types import Request


class SessionAttributes(Struct, frozen=True):
    """A session, as far as its span tells of it."""

    session_id: str
    task_id: str
    sample: int
    run: str
    node_id: str
    agent: str
    model: str


class SessionSpan:
    """Of a session that nobody traces."""

    def enter_stage(self, name: str | None) -> None:
        """It is in this stage from now on; None: in none any more."""

    def end(self, verdict: Verdict, *, turns: int, tokens: int) -> None:
        pass


class Tracing:
    """For nobody."""

    def start_session(self, attributes: SessionAttributes) -> SessionSpan:  # noqa: ARG002
        return _NO_SPAN

    def record_call(self, exchange: Exchange, request: Request, *, served: list[str], error: str | None) -> None:
        """A model call has ended. `served` are the models of its replica, and `error` the kind of its failure."""


_NO_SPAN = SessionSpan()
_current = Tracing()


def current() -> Tracing:
    return _current


@asynccontextmanager
async def export_traces(
    endpoint: str | None, *, provider: str, headers: Mapping[str, str] | None = None
) -> AsyncIterator[None]:
    """Meanwhile, spans go to this OTLP/HTTP collector; None: nowhere. `provider` is who samples: the engine's kind."""
    if endpoint is None:
        yield
        return
    try:
        from polar.telemetry.otlp import OpenTelemetry, make_exporter
    except ImportError as error:
        raise ConfigError(
            f"Traces need OpenTelemetry ({error}): {install_hint('otel')}, or leave [telemetry] otlp_endpoint out."
        ) from error
    traces = OpenTelemetry(make_exporter(endpoint, headers or {}), provider)
    with use_tracing(traces):
        try:
            yield
        finally:
            await traces.close()


@contextmanager
def use_tracing(tracing: Tracing) -> Iterator[None]:
    """Meanwhile, this is who is told."""
    global _current
    previous, _current = _current, tracing
    try:
        yield
    finally:
        _current = previous
