"""From a call to the token ids that its engine gets, and back from sampled ids to what the harness is told.

Rendering belongs to `polar.rendering`; here it meets the session: which turns it has had, and their ids, of which the
latest are kept at hand and the others read from the store.

A call that only the engine can render (pictures, raw prompts, forced formats) goes to the engine's chat API as it is.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator

import msgspec
import numpy as np
from msgspec import Struct

from polar.config import EngineSettings
from polar.engines.base import Chunk, Ids, TokenPrompt
from polar.engines.pool import Pool
from polar.engines.pools import Pools
from polar.engines.tools import CallTranslator, flatten, flatten_parts
from polar.errors import ApiError
from polar.gateway.capture import Call, Rendered
from polar.gateway.sessions import OpenSession
from polar.gateway.stops import StopStrings
from polar.rendering.continuation import Base, History, Known, Plan
from polar.rendering.families import Parser
from polar.rendering.model import Model, renderable
from polar.rendering.saying import Saying, saying
from polar.rendering.template import TemplateError
from polar.store.base import Continuation, Exchange, Store
from polar.store.lru import Lru
from polar.types import Event, ReasoningDelta, Request

log = logging.getLogger(__name__)

_INLINE = 16 * 1024
"""Bytes of a request up to which rendering it is quicker than handing it to a thread."""

MEMORY = 256 * 1024 * 1024
"""For the ids of sessions' latest prompts."""


class _Held(Struct):
    """An exchange's ids: its prompt and what was sampled, and the prompt once more as JSON, without brackets."""

    ids: Ids
    prompt_json: bytes


class Prompting:
    def __init__(self, settings: EngineSettings, pools: Pools, store: Store) -> None:
        self._settings = settings
        self._pools = pools
        self._store = store
        self._model: Model | None = None
        self._held: Lru[str, _Held] = Lru(MEMORY)
        self._warned = False

    async def render(self, call: Call, *, samples: bool = True) -> tuple[Model, Rendered] | tuple[None, None]:
        """Nothing where the engine is to render. Raises ApiError where the template refuses the request."""
        model = await self.model(self._pools.of(call.session.run)) if renderable(call.request) else None
        if model is None:
            return None, None
        session = call.session
        history = await self.history(session)
        if samples:
            await self._settle(call)
        cuts = await self._partial_turns(session, history)
        request = flatten(call.request)

        def cut(known: Known, shown: Saying) -> int | None:
            sampled = cuts.get(known.exchange_id)
            return None if sampled is None else model.cut(known, shown, sampled.tolist(), request)

        def plan() -> tuple[Plan, Ids]:
            made = model.plan(request, history, cut)
            return made, model.encoder.encode(made.text, first=made.base is None)

        try:
            made, new = await asyncio.to_thread(plan) if len(call.body) > _INLINE else plan()
        except TemplateError as error:
            raise ApiError("invalid_request", str(error)) from error
        except RecursionError as error:
            raise ApiError("invalid_request", "The request is nested too deeply to be rendered.") from error
        if made.base is None:
            prompt = TokenPrompt(new, _json(new))
            continuation: Continuation = "rendered"
        else:
            prompt = await self._extended(session, made.base, new)
            continuation = "recorded"
        parent = made.base.known.exchange_id if made.base is not None and made.base.sampled is not None else None
        return model, Rendered(prompt, request, made.end, continuation, parent, made.reason, made.mark)

    async def count(self, call: Call) -> int | None:
        """The prompt's length, without sampling; None where only the engine can tell."""
        _, rendered = await self.render(call, samples=False)
        return None if rendered is None else len(rendered.prompt.ids)

    async def model(self, pool: Pool) -> Model | None:
        """None where there is no tokenizer, or the engine takes no token ids. One for all engines, which have the same
        model."""
        if self._model is not None:
            return self._model
        if self._settings.render == "engine" or not pool.replicas:
            return None
        engine = pool.replicas[0].engine
        folder = engine.tokenizer_folder()
        if not engine.capabilities.takes_ids or folder is None:
            if engine.capabilities.takes_ids and not self._warned:
                self._warned = True
                log.warning(
                    "No tokenizer is configured: the engine renders prompts, and histories are tokenised anew with "
                    "every call. Set [engine] tokenizer to the model's folder to continue from recorded tokens."
                )
            return None
        mode = self._settings.continuation
        self._model = await asyncio.to_thread(Model.load, folder, mode, self._settings.template_kwargs)
        return self._model

    # A session's turns

    async def history(self, session: OpenSession) -> History:
        """Those of a session from before a restart are read from the store."""
        if session.history is None:
            history = History()
            if session.resumed:
                async for exchange in self._store.exchanges(session.session_id):
                    _remember(history, exchange)
            if session.history is None:  # still: another call may have been faster, and gone on since
                session.history = history
        return session.history

    def learn(self, session: OpenSession, exchange: Exchange, rendered: Rendered | None) -> None:
        """Takes in an exchange that was recorded."""
        if session.history is None or exchange.prompt_ids is None or exchange.sampled_ids is None:
            return
        _remember(session.history, exchange)
        if rendered is not None:
            ids = np.concatenate([exchange.prompt_ids, exchange.sampled_ids])
            held = _Held(ids, rendered.prompt.json)
            if rendered.parent is not None:
                self._held.drop(rendered.parent)  # who goes on from there again finds it in the store
            self._held.put(exchange.exchange_id, held, ids.nbytes + len(held.prompt_json))

    def amend(self, session: OpenSession, exchange_id: str, delivered: int) -> None:
        """It turned out that a harness got more, or less, of a turn."""
        known = session.history.known.get(exchange_id) if session.history else None
        if known is not None:
            known.delivered = delivered

    async def _settle(self, call: Call) -> None:
        """A request that goes on from a turn whose harness went away a moment ago: that turn is over now."""
        for orphan in list(call.session.orphans):
            if orphan.capture.exchange_id.encode() in call.body:
                orphan.give_up()
                await orphan.settled()

    async def _partial_turns(self, session: OpenSession, history: History) -> dict[str, Ids]:
        """The sampled ids of turns that were cut: few, if any."""
        found = {}
        for known in list(history.known.values()):  # more may be learned meanwhile
            if not known.whole and known.delivered:
                ids = (await self._ids(session, known)).ids
                found[known.exchange_id] = ids[known.prompt :]
        return found

    async def _ids(self, session: OpenSession, known: Known) -> _Held:
        held = self._held.get(known.exchange_id)
        if held is None:
            ids = await self._store.context(session.session_id, known.seq)
            held = _Held(ids, _json(ids[: known.prompt]))
            self._held.put(known.exchange_id, held, ids.nbytes + len(held.prompt_json))
        return held

    async def _extended(self, session: OpenSession, base: Base, new: Ids) -> TokenPrompt:
        known = base.known
        held = await self._ids(session, known)
        ids = base.extended(held.ids, new)
        if base.sampled is None:
            text, unwritten = _without(held.prompt_json, base.drop), new
        else:
            text, unwritten = held.prompt_json, ids[known.prompt :]
        return TokenPrompt(ids, b",".join(filter(None, (text, _json(unwritten)))))


def _remember(history: History, exchange: Exchange) -> None:
    if exchange.context is None:
        history.unmarked.add(exchange.exchange_id)
    if (
        exchange.context is None
        or exchange.reply is None
        or exchange.prompt_ids is None
        or exchange.sampled_ids is None
    ):
        return
    history.add(
        Known(
            exchange.exchange_id,
            exchange.seq,
            exchange.context,
            saying(flatten_parts(exchange.reply.parts)),
            len(exchange.prompt_ids),
            len(exchange.sampled_ids),
            exchange.delivered,
            ended=exchange.finish_reason is not None,
        ),
        exchange.reply.parts,
    )


def _json(ids: Ids) -> bytes:
    """As a JSON list without its brackets."""
    return msgspec.json.encode(ids.tolist())[1:-1]


def _without(text: bytes, count: int) -> bytes:
    """Without the last so many numbers."""
    for _ in range(count):
        text = text.rpartition(b",")[0]
    return text


async def parsed(chunks: AsyncGenerator[Chunk, None], parser: Parser, request: Request) -> AsyncGenerator[Chunk, None]:
    """Sampled ids, with what they say beside them."""
    translator = CallTranslator(request.tools)
    stops = StopStrings(request.sampling.stop)
    try:
        async for chunk in chunks:
            said: list[Event] = []
            chunk.reasoning = 0
            for id in chunk.ids:
                new = parser.feed((id,))
                chunk.reasoning += any(isinstance(event, ReasoningDelta) for event in new)
                said += new
            events = translator.translate(said)
            if chunk.finish_reason is not None:
                events += translator.translate(parser.finish()) + translator.flush()
                chunk.events = stops.feed(events) + stops.finish(chunk.stop_sequence)
            else:
                chunk.events = stops.feed(events)
            yield chunk
    finally:
        await chunks.aclose()
