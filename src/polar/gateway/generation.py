"""One generation: a model call from the engine's first token to the store.

It runs in a task of its own, apart from the connection that asked for it, so that a harness that disconnects for a
moment loses nothing. Events are kept until the end: a reader gets all of them, from the first.

    engine --chunks--> Generation --events--> reader (the harness's connection; at most one at a time)
                           |
                           +--> TokenRecord (what was sampled), ReplicaObserver (versions), CallTimer (the clock)
                           |
                           +-- at the end, before the reader is told so --> store (durable)

A GenerationRegistry starts a gateway's generations and keeps them until they are recorded and no retry can attach to
them. Invariant: a reader sees `finished` only after the exchange is durable.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence

from msgspec import Struct

from polar import ids
from polar.engines.base import Chunk, TokenPrompt
from polar.engines.fleet import EngineFleet
from polar.engines.replica import Replica
from polar.errors import ApiError, EngineError, StoreError
from polar.gateway.call import HarnessCall, PreparedPrompt
from polar.gateway.call_journal import CallJournal
from polar.gateway.meter import CallTimer
from polar.gateway.metrics import GatewayMetrics
from polar.gateway.prompt_id_parser import PromptIdParser
from polar.gateway.prompt_renderer import PromptRenderer, parse_chunks
from polar.gateway.replica_observer import ReplicaObserver
from polar.gateway.session_registry import OpenSession
from polar.gateway.token_record import TokenRecord
from polar.records.exchange import ExchangeStatus, StartedCall
from polar.rendering.families import ReplyParser
from polar.store.base import Store
from polar.telemetry import tracing
from polar.telemetry.logs import bind
from polar.types import ReplyEvent, Request, TextDelta

log = logging.getLogger(__name__)

MAX_RECORDED_REFUSAL_BYTES = 1024 * 1024
"""A request that does not fit the model's context is recorded up to this size."""

_SLOW_START_SECONDS = 5.0
"""Seconds within which an engine should begin to sample."""

_START_EVENTS = (TextDelta(""),)
"""Sent for a first chunk without events, so that the harness sees the reply begin."""


class GenerationContext(Struct, frozen=True):
    """The parts of a gateway that all of its generations share."""

    pools: EngineFleet
    store: Store
    journal: CallJournal
    metrics: GatewayMetrics
    prompt_ids: PromptIdParser
    prompt_renderer: PromptRenderer
    wants_logprobs: bool
    grace_seconds: float  # seconds that a generation goes on after its harness went away


class GenerationRegistry:
    """A gateway's generations, by session: those that run, and orphans, whose harness went away a moment ago."""

    def __init__(self, context: GenerationContext) -> None:
        self._context = context
        self._running: dict[str, set[Generation]] = {}
        self._orphans: dict[str, list[Generation]] = {}

    def start(self, session: OpenSession, call: HarnessCall) -> "Generation":
        generation = Generation(session, call, self._context, self)
        self._running.setdefault(session.session_id, set()).add(generation)
        return generation

    def attach_retry(self, session: OpenSession, call: HarnessCall) -> "Generation | None":
        """Attaches the call to an orphan with the same request. Returns None if there is none."""
        for orphan in self._orphans.get(session.session_id, ()):
            if orphan.can_serve_retry(call):
                orphan.attach()
                return orphan
        return None

    async def end_continued(self, session: OpenSession, call: HarnessCall) -> None:
        """Ends orphans whose turn this call continues: the harness has accepted that turn as it is."""
        for orphan in tuple(self._orphans.get(session.session_id, ())):
            if orphan.record.exchange_id.encode() in call.body:
                orphan.give_up()
                await orphan.wait_until_recorded()

    async def end_all(self, session: OpenSession) -> None:
        """Gives up a session's generations, and waits until they are recorded."""
        await _give_up([*self._running.get(session.session_id, ()), *self.list_orphans(session)])

    async def close(self) -> None:
        """Gives up all generations, and waits until they are recorded."""
        groups = *self._running.values(), *self._orphans.values()
        await _give_up([generation for group in groups for generation in group])

    def list_orphans(self, session: OpenSession) -> "Sequence[Generation]":
        return list(self._orphans.get(session.session_id, ()))

    # Called by generations

    def remove_running(self, generation: "Generation") -> None:
        """Forgets a generation that was recorded, or could not be."""
        session_id = generation.session.session_id
        running = self._running[session_id]
        running.discard(generation)
        if not running:
            del self._running[session_id]

    def add_orphan(self, generation: "Generation") -> None:
        self._orphans.setdefault(generation.session.session_id, []).append(generation)

    def remove_orphan(self, generation: "Generation") -> None:
        """Does nothing if the generation is no orphan."""
        session_id = generation.session.session_id
        orphans = self._orphans.get(session_id, [])
        if generation in orphans:
            orphans.remove(generation)
            if not orphans:
                del self._orphans[session_id]


async def _give_up(generations: "Sequence[Generation]") -> None:
    for generation in generations:
        generation.give_up()
    for generation in generations:
        await generation.wait_until_recorded()


class Generation:
    """Made by GenerationRegistry.start."""

    def __init__(
        self, session: OpenSession, call: HarnessCall, context: GenerationContext, registry: GenerationRegistry
    ) -> None:
        self.session = session
        self.call = call
        self.events: list[ReplyEvent] = []
        self.finished = False
        self.error: ApiError | None = None
        self._context = context
        self._registry = registry
        self._pool = context.pools.get_pool(session.run)
        self._started_at = time.time()
        self._first_token_at: float | None = None
        started = StartedCall(
            exchange_id=ids.new_exchange_id(),
            session_id=session.session_id,
            seq=session.take_seq(),
            dialect=call.dialect.name,
            list_name=call.raw_request.list_name,
            model=call.request.model,
            started_at=self._started_at,
            request_bytes=len(call.body),
        )
        self.record = TokenRecord(call, started)
        self._timer = CallTimer(session.meter.clock)
        self._observer = ReplicaObserver(self.record, self._timer)
        self._tokens_at_event: list[int] = []  # for each event, the tokens sampled up to and with its chunk
        self._delivered_tokens = 0
        self._is_sampling = False
        self._has_reader = True
        self._is_served = False
        self._given_up = False
        self._rendered: PreparedPrompt | None = None
        self._parser: ReplyParser | None = None
        self._recorded_delivery: tuple[ExchangeStatus, int] | None = None  # and how many tokens were delivered
        self._waiter: asyncio.Future[None] | None = None
        self._give_up_timer: asyncio.TimerHandle | None = None
        self._amend_task: asyncio.Task[None] | None = None
        context.metrics.running_calls.inc()
        context.journal.start(started)
        self._task = asyncio.get_running_loop().create_task(self._run())

    # The reader's side

    async def wait_for_events(self, known_events: int) -> None:
        """Waits until there are more than `known_events` events, the generation is finished, or `wake` is called."""
        if len(self.events) == known_events and not self.finished:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def mark_delivered(self, events: int) -> None:
        """Notes that the text of the first `events` events was written to the harness."""
        self._delivered_tokens = max(self._delivered_tokens, self._tokens_at_event[events - 1])

    def mark_served(self) -> None:
        """Notes that the reply was written to its last byte."""
        self._is_served = True

    def can_serve_retry(self, call: HarnessCall) -> bool:
        """Whether a retry may get this reply. A failed generation answers nothing: the retry hopes for a better one."""
        return self.error is None and self.call.is_retry_of(call)

    def attach(self) -> None:
        """Accepts a new reader, which reads from the first event on."""
        self._has_reader = True
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None
        self._registry.remove_orphan(self)

    def detach(self) -> None:
        """Lets the reader go. If it was not served (the harness disconnected), the generation goes on for a moment, so
        that a retry can attach to it, and is given up after that."""
        self._has_reader = False
        if not self._is_served:
            self._registry.add_orphan(self)
            self._give_up_timer = asyncio.get_running_loop().call_later(self._context.grace_seconds, self.give_up)
        else:
            self._correct_delivery()  # it may have been recorded while nobody was reading

    def give_up(self) -> None:
        """Stops the generation, which nobody will read: its harness stayed away, or the session ended."""
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None
        self._registry.remove_orphan(self)
        self._given_up = True
        if self._is_sampling:
            self._task.cancel()  # a task that has not begun checks `_given_up` itself; cancelling it would skip its end
        elif self.finished:
            self._correct_delivery()

    async def wait_until_recorded(self) -> None:
        """Waits until the exchange, and any correction of it, is recorded."""
        await asyncio.wait([self._task])
        if self._amend_task is not None:
            await asyncio.wait([self._amend_task])

    # The engine's side

    async def _run(self) -> None:
        record, session = self.record, self.session
        status: ExchangeStatus = "complete"
        chunks: AsyncGenerator[Chunk, None] | None = None
        self._is_sampling = True
        bind(session_id=session.session_id, run=session.run, exchange_id=record.exchange_id)
        if session.group != session.session_id:
            bind(task_id=session.group)
        try:
            if self._given_up:
                raise asyncio.CancelledError
            self._timer.start_waiting(paused=self._pool.gate.paused)
            chunks = await self._generate_chunks()
            async for chunk in chunks:
                if not self.events:
                    self._observer.mark_begun()
                if chunk.ids:
                    if not record.sampled:
                        self._first_token_at = time.time()
                    session.meter.add_tokens(len(chunk.ids))
                record.add_chunk(chunk)
                for event in chunk.events or (() if self.events else _START_EVENTS):
                    self.events.append(event)
                    self._tokens_at_event.append(len(record.sampled))
                self.wake()
        except ApiError as error:  # the template refuses the request
            self.error = error
        except EngineError as error:
            self.error = error.to_api_error()
        except asyncio.CancelledError:
            self.error = ApiError("timeout", "The call was given up, because nobody waited for its reply any more.")
        except Exception:
            log.exception("exchange %s failed while it was sampled", record.exchange_id)
            self.error = _make_internal_error()
        finally:
            self._stop_metering()
            self._is_sampling = False  # from here on nothing cancels this task, so that the exchange is recorded
            if chunks is not None:
                await chunks.aclose()
        if self._parser is not None:
            record.malformed = self._parser.malformed
        if self.error is not None:
            status = "partial" if record.sampled else "failed"
        elif not self._has_reader:
            status = "partial"  # nobody has read it yet; amended if a retry attaches
        meter = session.meter
        try:
            if self._is_oversized_refusal():
                meter.has_unrecorded_long_call = True
                self._context.journal.drop(record.exchange_id)
            else:
                await self._record(status)
            meter.recording_error = None
        except StoreError as error:
            # A reply that is not durable is not delivered. The harness may try again when the store works.
            self.error = ApiError("overloaded", f"The reply could not be recorded: {error}")
            meter.recording_error = str(self.error)
        except Exception:
            log.exception("exchange %s could not be recorded", record.exchange_id)
            self.error = _make_internal_error()
            meter.recording_error = str(self.error)
        finally:
            self._registry.remove_running(self)
            self._context.metrics.running_calls.dec()
            self.finished = True
            self.wake()
        if self._given_up:
            self._correct_delivery()

    async def _generate_chunks(self) -> AsyncGenerator[Chunk, None]:
        """Starts sampling, on token ids made here unless only the engine can render the prompt."""
        session, call = self.session, self.call
        await self._pool.wait_until_routable()
        await self._registry.end_continued(session, call)
        model, rendered = await self._context.prompt_renderer.render(session, call)
        if model is None or rendered is None:
            return self._sample(call.request, None)
        self._rendered = rendered
        self.record.set_prompt(rendered)
        self._parser = model.make_parser(rendered.request, rendered.text_tail)
        return parse_chunks(self._sample(rendered.request, rendered.prompt), self._parser, call.request)

    def _sample(self, request: Request, prompt: TokenPrompt | None) -> AsyncGenerator[Chunk, None]:
        return self._pool.generate(
            request,
            stream=request.stream,
            prompt=prompt,
            group=self.session.group,
            preferred=self.session.replica,
            call=self._observer,
            on_chosen=self._assign_replica,
        )

    def _assign_replica(self, replica: Replica) -> None:
        self.session.replica = replica
        self._observer.assign(replica)
        if not self.call.request.stream:
            self._observer.mark_begun()  # its first chunk will be its last

    def _stop_metering(self) -> None:
        """Ends the metering when sampling has ended. A call that was given up counts as a failure only if its engine
        had not begun after a long wait: that is the platform's failure, not the harness's."""
        self._timer.stop()
        meter = self.session.meter
        meter.add_tokens(self.record.unlisted_tokens)
        late = time.time() - self._started_at > _SLOW_START_SECONDS and not self._timer.has_begun
        if self.error is not None and (late or not self._given_up):
            meter.record_failure(self.record.exchange_id, self.error)

    def _is_oversized_refusal(self) -> bool:
        """Whether the request did not fit the context, and is so long that recording it would delay other calls."""
        too_long = self.error is not None and self.error.kind == "context_length" and not self.record.sampled
        return too_long and len(self.call.body) > MAX_RECORDED_REFUSAL_BYTES

    async def _record(self, status: ExchangeStatus) -> None:
        record, context, session = self.record, self._context, self.session
        replica = self._observer.replica
        delivered = len(record.sampled) if status == "complete" else self._delivered_tokens
        record.parse_prompt_ids(context.prompt_ids)
        exchange = record.build_exchange(
            status,
            delivered,
            str(self.error) if self.error else None,
            engine=replica.engine if replica else None,
            versions=self._observer.build_version_spans(),
            first_token_at=self._first_token_at,
            ended_at=time.time(),
            wants_logprobs=context.wants_logprobs,
        )
        await context.store.append(exchange)
        context.journal.mark_recorded(exchange.exchange_id)
        self._recorded_delivery = status, delivered
        context.prompt_renderer.add_exchange(session, exchange, self._rendered)
        context.metrics.record_exchange(exchange)
        usage = exchange.usage
        session.meter.usage_totals.add(usage, answered=status == "complete")
        log.debug("exchange %s is %s: %d + %d tokens", exchange.exchange_id, status, usage.prompt, usage.completion)
        tracing.current().record_call(
            exchange,
            self.call.request,
            served=replica.engine.capabilities.models if replica else [],
            error=self.error.kind if self.error else None,
        )

    def _correct_delivery(self) -> None:
        """Amends the recorded exchange if its status or delivered tokens have changed since."""
        if self._recorded_delivery is None:
            return
        status, delivered = self._recorded_delivery[0], self._delivered_tokens
        if self.error is None:
            status = "complete" if self._is_served else "partial"
        if status == "complete":
            delivered = len(self.record.sampled)
        if (status, delivered) != self._recorded_delivery:
            self._recorded_delivery = status, delivered
            self._context.prompt_renderer.set_delivered(self.session, self.record.exchange_id, delivered)
            self._amend_task = asyncio.get_running_loop().create_task(self._amend(status, delivered))

    async def _amend(self, status: ExchangeStatus, delivered: int) -> None:
        try:
            await self._context.store.amend(self.record.exchange_id, status=status, delivered=delivered)
        except StoreError as error:
            log.error("exchange %s: its delivered tokens could not be corrected: %s", self.record.exchange_id, error)


def _make_internal_error() -> ApiError:
    return ApiError("internal", "Polar's gateway failed on this call; its log says why.")
