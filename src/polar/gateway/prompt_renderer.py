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
from polar.engines.base import Chunk, TokenPrompt
from polar.engines.fleet import EngineFleet
from polar.engines.pool import EnginePool
from polar.engines.tools import CallTranslator, flatten_parts, flatten_request
from polar.errors import ApiError
from polar.gateway.call import HarnessCall, PreparedPrompt
from polar.gateway.session_registry import OpenSession
from polar.records.exchange import Continuation, Exchange, TokenIds
from polar.rendering.continuation import RecordedPrefix, RecordedTurn, TurnHistory
from polar.rendering.encoder import NewTextLimitExceeded, limit_new_text
from polar.rendering.families import ReplyParser
from polar.rendering.model_codec import ModelCodec, is_renderable
from polar.rendering.model_registry import LoadedModel, ModelRegistry
from polar.rendering.prompt_job import ContextExceeded, PromptJob, RenderedPrompt, encode_ids_json, make_prompt
from polar.rendering.template import TemplateError
from polar.rendering.turn_digest import digest_turn
from polar.rendering.worker_pool import RenderTimeout, WorkerDied
from polar.store.base import Store
from polar.store.sized_cache import SizedCache
from polar.types import ReasoningDelta, ReplyEvent, Request, Text, TextDelta, ToolResult

log = logging.getLogger(__name__)

_EVENT_LOOP_BODY_BYTES = 16 * 1024
"""Bytes of a request up to which rendering it is quicker than handing it to a thread."""

_IN_PROCESS_NEW_TEXT_BYTES = 32 * 1024
"""Bytes of new text up to which a prompt is made in this process: about as much as is encoded in the time that it takes
to have another process do it."""

_IN_PROCESS_BODY_BYTES = 1024 * 1024
"""Bytes of a request up to which its prompt may be made in this process, however little of it is new."""

_EVENT_LOOP_MESSAGES = 2048
"""Messages of a request from which on even looking through them takes a thread."""

_EVENT_LOOP_IDS = 16 * 1024
"""Ids that are written as JSON on the event loop."""

_MIN_BODY_LIMIT_BYTES, _MAX_BODY_LIMIT_BYTES = 16 * 1024 * 1024, 64 * 1024 * 1024
"""Bytes between which the limit of a request's body lies. A context may be short, but pictures need room."""

_DEFAULT_BODY_LIMIT_BYTES = 32 * 1024 * 1024
"""Where the model's tokenizer or context is not known."""

_NON_TEXT_BYTES = 1024 * 1024
"""Bytes of a body that are no text of its messages."""

ID_CACHE_BYTES = 256 * 1024 * 1024
"""For the ids of sessions' latest prompts."""


class _ExchangeIds(Struct):
    """An exchange's ids: its prompt and what was sampled, and the prompt once more as JSON, without brackets."""

    ids: TokenIds
    prompt_json: bytes


class PromptRenderer:
    def __init__(self, settings: EngineSettings, pools: EngineFleet, store: Store) -> None:
        self._settings = settings
        self._pools = pools
        self._store = store
        self.models = ModelRegistry()
        self._id_cache: SizedCache[str, _ExchangeIds] = SizedCache(ID_CACHE_BYTES)
        self._histories: dict[str, TurnHistory] = {}  # by session, once a prompt has been rendered
        self._warned = False

    async def close(self) -> None:
        await self.models.close()

    def compute_body_limit(self, pool: EnginePool) -> int:
        """Bytes that a request may have: the most text that the model's context can hold, and something beside it."""
        context_length = _find_context_length(pool)
        folder, settings = pool.model.tokenizer_folder, pool.model.settings
        model = folder and self.models.get(folder, settings.continuation, settings.template_kwargs)
        if not model or context_length is None:
            return _DEFAULT_BODY_LIMIT_BYTES
        bytes_per_token = model.codec.encoder.text_bound.bytes_per_token
        if bytes_per_token is None:
            return _DEFAULT_BODY_LIMIT_BYTES
        needed = context_length * bytes_per_token + _NON_TEXT_BYTES
        return min(max(needed, _MIN_BODY_LIMIT_BYTES), _MAX_BODY_LIMIT_BYTES)

    async def render(
        self, session: OpenSession, call: HarnessCall
    ) -> tuple[ModelCodec, PreparedPrompt] | tuple[None, None]:
        """Nothing where the engine is to render. Raises ApiError where the template refuses the request, or where it
        can't fit the model's context."""
        pool = self._pools.get_pool(session.run)
        loaded = await self.load_model(pool)
        if loaded is None:
            return None, None
        model = loaded.codec
        context_length = _find_context_length(pool)
        look = partial(_prepare_request, call, model, context_length)
        request = await asyncio.to_thread(look) if len(call.request.messages) > _EVENT_LOOP_MESSAGES else look()
        if request is None:
            return None, None
        history = await self.load_history(session)
        partial_turns = await self._load_partial_turns(session, history)
        try:
            made = await self._render_prompt(session, call, loaded, request, history, partial_turns, context_length)
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
            prompt = TokenPrompt(made.ids, made.ids_json)
            continuation: Continuation = "rendered"
        else:
            exchange_id, sampled, drop = made.base
            prompt = await self._extend_recorded(
                session, RecordedPrefix(history.turns[exchange_id], sampled, drop), made
            )
            continuation = "recorded"
            parent = None if sampled is None else exchange_id
        return model, PreparedPrompt(prompt, request, made.prompt_end, continuation, parent, made.reason, made.mark)

    async def _render_prompt(
        self,
        session: OpenSession,
        call: HarnessCall,
        model: LoadedModel,
        request: Request,
        history: TurnHistory,
        partial_turns: dict[str, list[int]],
        context_length: int | None,
    ) -> RenderedPrompt:
        def make() -> RenderedPrompt:
            with limit_new_text(2 * _IN_PROCESS_NEW_TEXT_BYTES):  # it is guarded, and then encoded
                return make_prompt(model.codec, request, history, partial_turns, context_length)

        if len(call.body) <= _IN_PROCESS_BODY_BYTES:
            try:
                return await asyncio.to_thread(make) if len(call.body) > _EVENT_LOOP_BODY_BYTES else make()
            except NewTextLimitExceeded:
                pass
        job = PromptJob.from_request(request, history, partial_turns, context_length)
        return await model.workers.make_prompt(session.session_id, job)

    async def count_tokens(self, session: OpenSession, call: HarnessCall) -> int | None:
        """The prompt's length; None where only the engine can tell."""
        _, rendered = await self.render(session, call)
        return None if rendered is None else len(rendered.prompt.ids)

    async def load_model(self, pool: EnginePool) -> LoadedModel | None:
        """The model of a run, for which its prompts are made. None where there is no tokenizer, or the engine takes no
        token ids."""
        settings = pool.model.settings
        engine = pool.replicas[0].engine if pool.replicas else None
        if settings.render == "engine" or (engine is not None and not engine.capabilities.accepts_token_ids):
            return None
        folder = pool.model.tokenizer_folder
        if folder is None and engine is not None:
            folder = engine.find_tokenizer_folder()
        if folder is None:
            if engine is not None and not self._warned:
                self._warned = True
                log.warning(
                    "No tokenizer is configured: the engine renders prompts, and histories are tokenised anew with "
                    "every call. Set [engine] tokenizer to the model's folder to continue from recorded tokens."
                )
            return None
        return await self.models.load(folder, settings.continuation, settings.template_kwargs)

    # A session's turns

    async def load_history(self, session: OpenSession) -> TurnHistory:
        """A session's turns. Those of a session from before a restart are read from the store."""
        history = self._histories.get(session.session_id)
        if history is not None:
            return history
        history = TurnHistory()
        if session.resumed:
            async for exchange in self._store.read_exchanges(session.session_id):
                _add_to_history(history, exchange)
        if session.ended:  # meanwhile: nothing is kept of it
            return history
        return self._histories.setdefault(session.session_id, history)  # another call may have been faster

    def add_exchange(self, session: OpenSession, exchange: Exchange, rendered: PreparedPrompt | None) -> None:
        """Takes in an exchange that was recorded, as `load_history` does with all of them after a restart."""
        history = self._histories.get(session.session_id)
        if history is None:
            if session.resumed:
                return  # it is read from the store, with those from before
            history = self._histories[session.session_id] = TurnHistory()
        _add_to_history(history, exchange)
        if (
            rendered is not None
            and exchange.prompt_ids is not None
            and exchange.sampled_ids is not None
            and exchange.exchange_id in history.turns
        ):
            ids = np.concatenate([exchange.prompt_ids, exchange.sampled_ids])
            held = _ExchangeIds(ids, rendered.prompt.json)
            if rendered.parent is not None:
                self._id_cache.drop(rendered.parent)  # who goes on from there again finds it in the store
            self._cache_ids(session, exchange.exchange_id, held)

    @property
    def memory_bytes(self) -> int:
        """Memory held for the next prompts of open sessions."""
        return self._id_cache.size

    def forget(self, session: OpenSession) -> None:
        """The session has ended, and goes on from none of its turns."""
        history = self._histories.pop(session.session_id, None)
        for exchange_id in history.turns if history else ():
            self._id_cache.drop(exchange_id)

    def set_delivered(self, session: OpenSession, exchange_id: str, delivered: int) -> None:
        """It turned out that a harness got more, or less, of a turn."""
        history = self._histories.get(session.session_id)
        known = history.turns.get(exchange_id) if history else None
        if known is not None:
            known.delivered_tokens = delivered

    async def _load_partial_turns(self, session: OpenSession, history: TurnHistory) -> dict[str, list[int]]:
        """The sampled ids of turns that were cut: few, if any."""
        found = {}
        for known in list(history.turns.values()):  # more may be learned meanwhile
            if not known.is_fully_delivered and known.delivered_tokens:
                ids = (await self._load_ids(session, known)).ids
                found[known.exchange_id] = ids[known.prompt_tokens :].tolist()
        return found

    async def _load_ids(self, session: OpenSession, known: RecordedTurn) -> _ExchangeIds:
        held = self._id_cache.get(known.exchange_id)
        if held is None:
            ids = await self._store.read_context_ids(session.session_id, known.seq)
            held = _ExchangeIds(ids, await _encode_ids(ids[: known.prompt_tokens]))
            self._cache_ids(session, known.exchange_id, held)
        return held

    def _cache_ids(self, session: OpenSession, exchange_id: str, held: _ExchangeIds) -> None:
        if not session.ended:
            self._id_cache.put(exchange_id, held, held.ids.nbytes + len(held.prompt_json))

    async def _extend_recorded(self, session: OpenSession, base: RecordedPrefix, new: RenderedPrompt) -> TokenPrompt:
        known = base.turn
        held = await self._load_ids(session, known)
        ids = base.extend(held.ids, new.ids)
        if base.sampled_tokens is None:
            text, behind = _drop_last_ids(held.prompt_json, base.dropped_tokens), new.ids_json
        else:
            text, behind = held.prompt_json, await _encode_ids(ids[known.prompt_tokens :])
        return TokenPrompt(ids, b",".join(filter(None, (text, behind))))


def _find_context_length(pool: EnginePool) -> int | None:
    """Of the replica with the longest one; None where one does not tell."""
    lengths = [replica.engine.capabilities.context_length for replica in pool.replicas]
    known = [length for length in lengths if length is not None]
    return max(known) if known and len(known) == len(lengths) else None


def _prepare_request(call: HarnessCall, model: ModelCodec, context_length: int | None) -> Request | None:
    """The request with plain function tools; None where only the engine can render it. Raises ApiError where it can't
    fit the context."""
    if context_length is not None and not _can_fit(call, model, context_length):
        raise ApiError("context_length", str(ContextExceeded(context_length)))
    return flatten_request(call.request) if is_renderable(call.request) else None


def _can_fit(call: HarnessCall, model: ModelCodec, context_length: int) -> bool:
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


async def _encode_ids(ids: TokenIds) -> bytes:
    """As a JSON list without its brackets."""
    return encode_ids_json(ids) if len(ids) <= _EVENT_LOOP_IDS else await asyncio.to_thread(encode_ids_json, ids)


def _add_to_history(history: TurnHistory, exchange: Exchange) -> None:
    if exchange.context_mark is None:
        history.unmarked.add(exchange.exchange_id)
    if (
        exchange.context_mark is None
        or exchange.reply is None
        or exchange.prompt_ids is None
        or exchange.sampled_ids is None
    ):
        return
    history.add(
        RecordedTurn(
            exchange.exchange_id,
            exchange.seq,
            exchange.context_mark,
            digest_turn(flatten_parts(exchange.reply.parts)),
            len(exchange.prompt_ids),
            len(exchange.sampled_ids),
            exchange.delivered,
            ended=exchange.finish_reason is not None,
        ),
        exchange.reply.parts,
    )


def _drop_last_ids(text: bytes, count: int) -> bytes:
    """Without the last so many numbers."""
    for _ in range(count):
        text = text.rpartition(b",")[0]
    return text


async def parse_chunks(
    chunks: AsyncGenerator[Chunk, None], parser: ReplyParser, request: Request
) -> AsyncGenerator[Chunk, None]:
    """Sampled ids, with what they say beside them."""
    translator = CallTranslator(request.tools)
    stops = StopStringFilter(request.sampling.stop)
    try:
        async for chunk in chunks:
            parsed_events: list[ReplyEvent] = []
            chunk.reasoning_tokens = 0
            for token_id in chunk.ids:
                new = parser.feed((token_id,))
                chunk.reasoning_tokens += any(isinstance(event, ReasoningDelta) for event in new)
                parsed_events += new
            events = translator.translate(parsed_events)
            if chunk.finish_reason is not None:
                events += translator.translate(parser.finish()) + translator.flush()
                chunk.events = stops.feed(events) + stops.finish(chunk.stop_sequence)
            else:
                chunk.events = stops.feed(events)
            yield chunk
    finally:
        await chunks.aclose()


class StopStringFilter:
    """Leaves out stop strings, for engines that hand out ids: the string that ended a reply is sampled, but not part of
    what is said. Text that may be the beginning of one is held back until it is known not to be."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def feed(self, events: list[ReplyEvent]) -> list[ReplyEvent]:
        if not self._stops:
            return events
        out: list[ReplyEvent] = []
        for event in events:
            if isinstance(event, TextDelta):
                self._held += event.text
                sure = len(self._held) - self._count_undecided_characters()
                if sure:
                    out.append(TextDelta(self._held[:sure]))
                    self._held = self._held[sure:]
            else:
                out += self._release()
                out.append(event)
        return out

    def finish(self, stopped_by: str | None) -> list[ReplyEvent]:
        """What was held, up to the string that ended the reply, if one did."""
        if stopped_by and (at := self._held.find(stopped_by)) >= 0:
            self._held = self._held[:at]
        return self._release()

    def _release(self) -> list[ReplyEvent]:
        held, self._held = self._held, ""
        return [TextDelta(held)] if held else []

    def _count_undecided_characters(self) -> int:
        """How many characters at the end may belong to a stop string: whole ones, too, since the engine says which it
        was."""
        first = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if first:
            return len(self._held) - min(first)
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
