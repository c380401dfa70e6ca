"""One generation: a model call from the engine's first token to the store.

It runs in a task of its own, apart from the connection that asked for it, so that a harness that goes away for a moment
loses nothing. Events are kept until the end: whoever reads gets them from the first.

    engine --chunks--> Generation --events--> reader (the harness's connection; at most one at a time)
                           |
                           +-- at the end, before the reader is told so --> store (durable)

Invariant: a reader sees `finished` only after the exchange is durable.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator

from msgspec import Struct

from polar.engines.base import Chunk, TokenPrompt
from polar.engines.pools import Pools
from polar.errors import ApiError, EngineError, StoreError
from polar.gateway.call_journal import CallJournal
from polar.gateway.capture import Call, Capture, Rendered
from polar.gateway.metrics import Metrics
from polar.gateway.prompt_ids import PromptIds
from polar.gateway.prompting import Prompting, parsed
from polar.rendering.families import Parser
from polar.store.base import ExchangeStatus, Store
from polar.telemetry import tracing
from polar.telemetry.logs import bind
from polar.types import Event, Request, TextDelta

log = logging.getLogger(__name__)

RECORDED_REFUSAL_BYTES = 1024 * 1024
"""Of a request that does not fit the model's context, up to which it is recorded all the same."""

_BEGINNING = (TextDelta(""),)
"""Says nothing but that the engine has begun."""


class Context(Struct, frozen=True):
    """What every generation of a gateway has in common."""

    pools: Pools
    store: Store
    journal: CallJournal
    metrics: Metrics
    prompts: PromptIds
    prompting: Prompting
    wants_logprobs: bool
    grace: float  # seconds that a generation goes on after its harness went away


class Generation:
    def __init__(self, call: Call, context: Context) -> None:
        self.call = call
        self.capture = Capture(call, call.session.take_seq())
        self.events: list[Event] = []
        self.finished = False
        self.error: ApiError | None = None
        self._context = context
        self._pool = context.pools.of(call.session.run)
        self._ends: list[int] = []  # for each event, the tokens sampled up to and with its chunk
        self._delivered = 0
        self._sampling = False
        self._reading = True
        self._served = False
        self._given_up = False
        self._rendered: Rendered | None = None
        self._parser: Parser | None = None
        self._recorded: tuple[ExchangeStatus, int] | None = None  # and how many tokens were delivered
        self._waiter: asyncio.Future[None] | None = None
        self._farewell: asyncio.TimerHandle | None = None
        self._amendment: asyncio.Task[None] | None = None
        call.session.running.add(self)
        context.metrics.running.inc()
        context.journal.start(self.capture.started_call)
        self._task = asyncio.get_running_loop().create_task(self._run())

    # The reader's side

    async def more(self, have: int) -> None:
        """Waits until there are more than `have` events, or the end, or somebody calls `wake`."""
        if len(self.events) == have and not self.finished:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def delivered(self, events: int) -> None:
        """Text was written to the harness, up to and with that of the last of so many events."""
        self._delivered = max(self._delivered, self._ends[events - 1])

    def served(self) -> None:
        """The reply was written to its last byte."""
        self._served = True

    def can_answer(self, call: Call) -> bool:
        """Whether a retry may have this reply. One that failed is no answer: the retry is for a better one."""
        return self.error is None and self.call.repeats(call)

    def attach(self) -> None:
        """A new reader takes over, from the first chunk on."""
        self._reading = True
        if self._farewell is not None:
            self._farewell.cancel()
            self._farewell = None
        self.call.session.orphans.remove(self)

    def detach(self) -> None:
        """The reader leaves: served, or because the harness went away. Then the generation goes on for a moment, so
        that a retry can attach to it, and is given up after that."""
        self._reading = False
        if not self._served:
            self.call.session.orphans.append(self)
            self._farewell = asyncio.get_running_loop().call_later(self._context.grace, self.give_up)
        else:
            self._correct()  # it may have been recorded while nobody was reading

    def give_up(self) -> None:
        """Nobody will read this any more: its harness stayed away, or the session ended."""
        if self._farewell is not None:
            self._farewell.cancel()
            self._farewell = None
        if self in self.call.session.orphans:
            self.call.session.orphans.remove(self)
        self._given_up = True
        if self._sampling:
            self._task.cancel()  # one that has not begun finds out by itself; cancelled before, it would never end
        elif self.finished:
            self._correct()

    async def settled(self) -> None:
        """Until all that is to be recorded of this generation is."""
        await asyncio.wait([self._task])
        if self._amendment is not None:
            await asyncio.wait([self._amendment])

    # The engine's side

    async def _run(self) -> None:
        capture = self.capture
        status: ExchangeStatus = "complete"
        chunks: AsyncGenerator[Chunk, None] | None = None
        self._sampling = True
        session = self.call.session
        bind(session_id=session.session_id, run=session.run, exchange_id=capture.exchange_id)
        if session.group != session.session_id:
            bind(task_id=session.group)
        try:
            if self._given_up:
                raise asyncio.CancelledError
            capture.waits(paused=self._pool.gate.paused)
            chunks = await self._chunks()
            async for chunk in chunks:
                if not self.events:
                    capture.begun()
                capture.take(chunk)
                for event in chunk.events or (() if self.events else _BEGINNING):
                    self.events.append(event)
                    self._ends.append(len(capture.sampled))
                self.wake()
        except ApiError as error:  # the template refuses the request
            self.error = error
        except EngineError as error:
            self.error = error.told()
        except asyncio.CancelledError:
            self.error = ApiError("timeout", "The call was given up, because nobody waited for its reply any more.")
        except Exception:
            log.exception("exchange %s failed while it was sampled", capture.exchange_id)
            self.error = _our_fault()
        finally:
            capture.over(self.error, given_up=self._given_up)
            self._sampling = False  # from here on nothing cancels this task: what was sampled gets recorded
            if chunks is not None:
                await chunks.aclose()
        if self._parser is not None:
            capture.malformed = self._parser.malformed
        if self.error is not None:
            status = "partial" if capture.sampled else "failed"
        elif not self._reading:
            status = "partial"  # nobody has it yet; amended if somebody still comes
        meter = self.call.session.meter
        try:
            if self._is_refused_giant():
                meter.too_long = True
                self._context.journal.drop(self.capture.exchange_id)
            else:
                await self._record(status)
            meter.unrecorded = None
        except StoreError as error:
            # What is not durable is not delivered: the harness may try again when the store is well.
            self.error = ApiError("overloaded", f"The reply could not be recorded: {error}")
            meter.unrecorded = str(self.error)
        except Exception:
            log.exception("exchange %s could not be recorded", capture.exchange_id)
            self.error = _our_fault()
            meter.unrecorded = str(self.error)
        finally:
            self.call.session.running.discard(self)
            self._context.metrics.running.dec()
            self.finished = True
            self.wake()
        if self._given_up:
            self._correct()

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        """What is sampled for this call, on ids of our own wherever they can be had."""
        call, capture = self.call, self.capture
        await self._pool.occupied()
        model, rendered = await self._context.prompting.render(call)
        if model is None or rendered is None:
            return self._sampled(call.request, None)
        self._rendered = rendered
        capture.rendered(rendered)
        self._parser = model.parser(rendered.request, rendered.end)
        return parsed(self._sampled(rendered.request, rendered.prompt), self._parser, call.request)

    def _sampled(self, request: Request, prompt: TokenPrompt | None) -> AsyncGenerator[Chunk, None]:
        return self._pool.generate(
            request,
            stream=request.stream,
            prompt=prompt,
            group=self.call.session.group,
            preferred=self.call.session.replica,
            call=self.capture,
            chosen=self.capture.chosen,
        )

    def _is_refused_giant(self) -> bool:
        """A request that did not fit the context and is long enough for its recording to keep others waiting."""
        too_long = self.error is not None and self.error.kind == "context_length" and not self.capture.sampled
        return too_long and len(self.call.body) > RECORDED_REFUSAL_BYTES

    async def _record(self, status: ExchangeStatus) -> None:
        delivered = len(self.capture.sampled) if status == "complete" else self._delivered
        error = str(self.error) if self.error else None
        self.capture.read_prompt(self._context.prompts)
        exchange = self.capture.exchange(status, delivered, error, wants_logprobs=self._context.wants_logprobs)
        await self._context.store.append(exchange)
        self._context.journal.mark_recorded(exchange.exchange_id)
        self._recorded = status, delivered
        self._context.prompting.learn(self.call.session, exchange, self._rendered)
        self._context.metrics.captured(exchange)
        used = exchange.usage
        self.call.session.meter.used.add(used, answered=status == "complete")
        log.debug("exchange %s is %s: %d + %d tokens", exchange.exchange_id, status, used.prompt, used.completion)
        replica = self.call.session.replica
        tracing.current().call(
            exchange,
            self.call.request,
            served=replica.engine.capabilities.models if replica else [],
            error=self.error.kind if self.error else None,
        )

    def _correct(self) -> None:
        """Makes the record say what was really delivered, once nobody reads any more."""
        if self._recorded is None:
            return
        status, delivered = self._recorded[0], self._delivered
        if self.error is None:
            status = "complete" if self._served else "partial"
        if status == "complete":
            delivered = len(self.capture.sampled)
        if (status, delivered) != self._recorded:
            self._recorded = status, delivered
            self._context.prompting.amend(self.call.session, self.capture.exchange_id, delivered)
            self._amendment = asyncio.get_running_loop().create_task(self._amend(status, delivered))

    async def _amend(self, status: ExchangeStatus, delivered: int) -> None:
        try:
            await self._context.store.amend(self.capture.exchange_id, status=status, delivered=delivered)
        except StoreError as error:
            log.error("exchange %s stays recorded as delivered otherwise: %s", self.capture.exchange_id, error)


def _our_fault() -> ApiError:
    return ApiError("internal", "Polar's gateway failed on this call; its log says why.")
