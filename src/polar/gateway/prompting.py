"""From a call to the token ids that its engine gets, and back from sampled ids to what the harness is told.

Rendering belongs to `polar.rendering`; here it meets the session: which turns it has had, and their ids, of which the
latest are kept at hand and the others read from the store.

A call that only the engine can render (pictures, raw prompts, forced formats) goes to the engine's chat API as it is.

Nobody waits for somebody else's long text. What can't fit the model's context is refused before it is rendered. A
prompt with much new text is made by another process (rendering/worker_pool.py), one with little in a thread or on the
event loop.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from functools import partial

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
from polar.rendering.continuation import Base, History, Known
from polar.rendering.encoder import BREAK, TooMuchNewText, new_text_limit
from polar.rendering.families import Parser
from polar.rendering.model import Model, renderable, resolve_folder
from polar.rendering.prompt_job import ContextExceeded, Prompt, PromptJob, ids_as_json, make_prompt
from polar.rendering.saying import saying
from polar.rendering.template import TemplateError
from polar.rendering.worker import Setup
from polar.rendering.worker_pool import RenderTimeout, WorkerDied, WorkerPool
from polar.store.base import Continuation, Exchange, Store
from polar.store.lru import Lru
from polar.types import Event, ReasoningDelta, Request, Text, ToolResult

log = logging.getLogger(__name__)

_INLINE = 16 * 1024
"""Bytes of a request up to which rendering it is quicker than handing it to a thread."""

_NEW_TEXT_HERE = 32 * 1024
"""Bytes of new text up to which a prompt is made in this process: about as much as is encoded in the time that it takes
to have another process do it."""

_BODY_HERE = 1024 * 1024
"""Bytes of a request up to which its prompt may be made in this process, however little of it is new."""

_MANY_MESSAGES = 2048
"""Messages of a request from which on even looking through them takes a thread."""

_IDS_HERE = 16 * 1024
"""Ids that are written as JSON on the event loop."""

_SMALLEST_BODY_LIMIT, _LARGEST_BODY_LIMIT = 16 * 1024 * 1024, 64 * 1024 * 1024
"""Bytes between which the limit of a request's body lies. A context may be short, but pictures need room."""

_UNKNOWN_BODY_LIMIT = 32 * 1024 * 1024
"""Where the model's tokenizer or context is not known."""

_BESIDE_TEXT = 1024 * 1024
"""Bytes of a body that are no text of its messages."""

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
        self.workers: WorkerPool | None = None
        self._held: Lru[str, _Held] = Lru(MEMORY)
        self._warned = False

    async def close(self) -> None:
        if self.workers is not None:
            await self.workers.close()

    def body_limit(self, pool: Pool) -> int:
        """Bytes that a request may have: the most text that the model's context can hold, and something beside it."""
        context_length = _context_length(pool)
        if self._model is None or context_length is None:
            return _UNKNOWN_BODY_LIMIT
        bytes_per_token = self._model.encoder.text_bound.bytes_per_token
        if bytes_per_token is None:
            return _UNKNOWN_BODY_LIMIT
        needed = context_length * bytes_per_token + _BESIDE_TEXT
        return min(max(needed, _SMALLEST_BODY_LIMIT), _LARGEST_BODY_LIMIT)

    async def render(self, call: Call, *, samples: bool = True) -> tuple[Model, Rendered] | tuple[None, None]:
        """Nothing where the engine is to render. Raises ApiError where the template refuses the request, or where it
        can't fit the model's context."""
        pool = self._pools.of(call.session.run)
        model = await self.model(pool)
        if model is None:
            return None, None
        context_length = _context_length(pool)
        look = partial(_prepare, call, model, context_length)
        request = await asyncio.to_thread(look) if len(call.request.messages) > _MANY_MESSAGES else look()
        if request is None:
            return None, None
        session = call.session
        history = await self.history(session)
        if samples:
            await self._settle(call)
        cuts = await self._partial_turns(session, history)
        try:
            made = await self._make(call, model, request, history, cuts, context_length)
        except TemplateError as error:
            raise ApiError("invalid_request", str(error)) from error
        except ContextExceeded as error:
            raise ApiError("context_length", str(error)) from error
        except RecursionError as error:
            raise ApiError("invalid_request", "The request is nested too deeply to be rendered.") from error
        except RenderTimeout as error:  # the harness's doing, whose request it is
            raise ApiError("invalid_request", str(error)) from error
        except WorkerDied as error:
            raise ApiError("internal", str(error)) from error
        parent: str | None = None
        if made.base is None:
            prompt = TokenPrompt(made.ids, made.json)
            continuation: Continuation = "rendered"
        else:
            exchange_id, sampled, drop = made.base
            prompt = await self._extend_recorded(session, Base(history.known[exchange_id], sampled, drop), made)
            continuation = "recorded"
            parent = None if sampled is None else exchange_id
        return model, Rendered(prompt, request, made.end, continuation, parent, made.reason, made.mark)

    async def _make(
        self,
        call: Call,
        model: Model,
        request: Request,
        history: History,
        cuts: dict[str, list[int]],
        context_length: int | None,
    ) -> Prompt:
        def make() -> Prompt:
            with new_text_limit(2 * _NEW_TEXT_HERE):  # it is guarded, and then encoded
                return make_prompt(model, request, history, cuts, context_length)

        assert self.workers is not None
        if len(call.body) <= _BODY_HERE:
            try:
                return await asyncio.to_thread(make) if len(call.body) > _INLINE else make()
            except TooMuchNewText:
                pass
        job = PromptJob.from_request(request, history, cuts, context_length)
        return await self.workers.make(call.session.session_id, job)

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
        mode, kwargs = self._settings.continuation, self._settings.template_kwargs
        path = await asyncio.to_thread(resolve_folder, folder)
        model = await asyncio.to_thread(Model.load, path, mode, kwargs)
        if self._model is None:  # still: another call may have been faster
            self._model = model
            self.workers = WorkerPool(Setup(str(path), mode, kwargs, BREAK))
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
        """Takes in an exchange that was recorded, as `history` does with all of them after a restart."""
        if session.history is None:
            if session.resumed:
                return  # it is read from the store, with those from before
            session.history = History()
        _remember(session.history, exchange)
        if (
            rendered is not None
            and exchange.prompt_ids is not None
            and exchange.sampled_ids is not None
            and exchange.exchange_id in session.history.known
        ):
            ids = np.concatenate([exchange.prompt_ids, exchange.sampled_ids])
            held = _Held(ids, rendered.prompt.json)
            if rendered.parent is not None:
                self._held.drop(rendered.parent)  # who goes on from there again finds it in the store
            self._keep(session, exchange.exchange_id, held)

    @property
    def memory_bytes(self) -> int:
        """Memory held for the next prompts of open sessions."""
        return self._held.size

    def forget(self, session: OpenSession) -> None:
        """The session has ended, and goes on from none of its turns."""
        for exchange_id in session.history.known if session.history else ():
            self._held.drop(exchange_id)

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

    async def _partial_turns(self, session: OpenSession, history: History) -> dict[str, list[int]]:
        """The sampled ids of turns that were cut: few, if any."""
        found = {}
        for known in list(history.known.values()):  # more may be learned meanwhile
            if not known.whole and known.delivered:
                ids = (await self._ids(session, known)).ids
                found[known.exchange_id] = ids[known.prompt :].tolist()
        return found

    async def _ids(self, session: OpenSession, known: Known) -> _Held:
        held = self._held.get(known.exchange_id)
        if held is None:
            ids = await self._store.context(session.session_id, known.seq)
            held = _Held(ids, await _written(ids[: known.prompt]))
            self._keep(session, known.exchange_id, held)
        return held

    def _keep(self, session: OpenSession, exchange_id: str, held: _Held) -> None:
        if not session.ended:
            self._held.put(exchange_id, held, held.ids.nbytes + len(held.prompt_json))

    async def _extend_recorded(self, session: OpenSession, base: Base, new: Prompt) -> TokenPrompt:
        known = base.known
        held = await self._ids(session, known)
        ids = base.extended(held.ids, new.ids)
        if base.sampled is None:
            text, behind = _without(held.prompt_json, base.drop), new.json
        else:
            text, behind = held.prompt_json, await _written(ids[known.prompt :])
        return TokenPrompt(ids, b",".join(filter(None, (text, behind))))


def _context_length(pool: Pool) -> int | None:
    """Of the replica with the longest one; None where one does not tell."""
    lengths = [replica.engine.capabilities.context_length for replica in pool.replicas]
    known = [length for length in lengths if length is not None]
    return max(known) if known and len(known) == len(lengths) else None


def _prepare(call: Call, model: Model, context_length: int | None) -> Request | None:
    """The request with plain function tools; None where only the engine can render it. Raises ApiError where it can't
    fit the context."""
    if context_length is not None and not _can_fit(call, model, context_length):
        raise ApiError("context_length", str(ContextExceeded(context_length)))
    return flatten(call.request) if renderable(call.request) else None


def _can_fit(call: Call, model: Model, context_length: int) -> bool:
    """False where a request has more text than the context can hold, whatever a template makes of it: the model's turns
    and the tools, of which templates leave things out, don't count, nor does white space at the edges."""
    messages = call.request.messages
    bound = model.encoder.text_bound
    if bound.bytes_per_token is None or len(call.body) <= bound.bytes_per_token * context_length:
        return len(messages) <= context_length
    texts = [call.request.prompt] if isinstance(call.request.prompt, str) else []
    for message in messages:
        if message.role != "assistant":
            for part in message.parts:
                shown = part.parts if isinstance(part, ToolResult) else [part]
                texts += [piece.text.strip() for piece in shown if isinstance(piece, Text)]
    return len(messages) <= context_length and bound.can_fit(texts, context_length)


async def _written(ids: Ids) -> bytes:
    """As a JSON list without its brackets."""
    return ids_as_json(ids) if len(ids) <= _IDS_HERE else await asyncio.to_thread(ids_as_json, ids)


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
