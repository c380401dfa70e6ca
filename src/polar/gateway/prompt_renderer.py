"""Renders a call to the token ids that its engine gets, and parses sampled ids into the events that the harness sees.

Rendering itself is `polar.rendering`'s; this module brings in the session: its turns, and their ids. The latest ids are
cached, older ones are read from the store.

A call that only the engine can render (pictures, raw prompts, forced formats) goes to the engine's chat API as it is.

A long prompt delays nobody else. One that can't fit the model's context is refused before it is rendered. A prompt with
much new text is rendered by another process (rendering/worker_pool.py), one with little in a thread or on the event
loop.
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
from polar.gateway.stop_strings import StopStringFilter
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
from polar.types import ReasoningDelta, ReplyEvent, Request, Text, ToolResult

log = logging.getLogger(__name__)

_EVENT_LOOP_BODY_BYTES = 16 * 1024
"""A request up to this size is rendered on the event loop: that is quicker than handing it to a thread."""

_IN_PROCESS_NEW_TEXT_BYTES = 32 * 1024
"""A prompt with new text up to this size is rendered in this process: handing it to another one would take as long."""

_IN_PROCESS_BODY_BYTES = 1024 * 1024
"""A request above this size is rendered by another process, however little of it is new."""

_EVENT_LOOP_MESSAGES = 2048
"""With more messages than this, even scanning them is left to a thread."""

_EVENT_LOOP_IDS = 16 * 1024
"""Ids up to this number are encoded as JSON on the event loop."""

_MIN_BODY_LIMIT_BYTES, _MAX_BODY_LIMIT_BYTES = 16 * 1024 * 1024, 64 * 1024 * 1024
"""Bounds of a request body's size limit. A context may be short, but pictures need room."""

_DEFAULT_BODY_LIMIT_BYTES = 32 * 1024 * 1024
"""Size limit of a request body if the model's tokenizer or context length is unknown."""

_NON_TEXT_BYTES = 1024 * 1024
"""Allowance for a body's content besides the text of its messages."""

ID_CACHE_BYTES = 256 * 1024 * 1024
"""Size of the cache of sessions' latest ids."""


class _ExchangeIds(Struct):
    """An exchange's prompt and sampled ids in one array, and the prompt's ids as a JSON list without its brackets."""

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
        """Returns how many bytes a request may have: the longest text that fits the context, and an allowance."""
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
        """Renders the call's prompt, and returns it with its model. Returns (None, None) if the engine must render it.
        Raises ApiError if the template refuses the request, or if it can't fit the model's context."""
        pool = self._pools.get_pool(session.run)
        loaded = await self.load_model(pool)
        if loaded is None:
            return None, None
        model = loaded.codec
        context_length = _find_context_length(pool)
        prepare = partial(_prepare_request, call, model, context_length)
        request = await asyncio.to_thread(prepare) if len(call.request.messages) > _EVENT_LOOP_MESSAGES else prepare()
        if request is None:
            return None, None
        history = await self.load_history(session)
        partial_turns = await self._load_partial_turns(session, history)
        try:
            rendered = await self._render_prompt(session, call, loaded, request, history, partial_turns, context_length)
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
        if rendered.base is None:
            prompt = TokenPrompt(rendered.ids, rendered.ids_json)
            continuation: Continuation = "rendered"
        else:
            exchange_id, sampled, drop = rendered.base
            prompt = await self._extend_recorded(
                session, RecordedPrefix(history.turns[exchange_id], sampled, drop), rendered
            )
            continuation = "recorded"
            parent = None if sampled is None else exchange_id
        return model, PreparedPrompt(
            prompt, request, rendered.prompt_end, continuation, parent, rendered.reason, rendered.mark
        )

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
        """Returns the prompt's length, or None if only the engine can count it."""
        _, rendered = await self.render(session, call)
        return None if rendered is None else len(rendered.prompt.ids)

    async def load_model(self, pool: EnginePool) -> LoadedModel | None:
        """Loads the model of a pool's run. Returns None if there is no tokenizer, or if the engine takes no token
        ids."""
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
        """Returns a session's turns; after a restart, they are read from the store."""
        history = self._histories.get(session.session_id)
        if history is not None:
            return history
        history = TurnHistory()
        if session.resumed:
            async for exchange in self._store.read_exchanges(session.session_id):
                _add_to_history(history, exchange)
        if session.ended:  # meanwhile: nothing more is kept of it
            return history
        return self._histories.setdefault(session.session_id, history)  # another call may have been faster

    def add_exchange(self, session: OpenSession, exchange: Exchange, rendered: PreparedPrompt | None) -> None:
        """Adds a recorded exchange to the session's history, as `load_history` does for all of them after a restart."""
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
            exchange_ids = _ExchangeIds(ids, rendered.prompt.json)
            if rendered.parent is not None:
                self._id_cache.drop(rendered.parent)  # a second continuation of the parent reads it from the store
            self._cache_ids(session, exchange.exchange_id, exchange_ids)

    @property
    def memory_bytes(self) -> int:
        """Memory held for the next prompts of open sessions."""
        return self._id_cache.size

    def forget(self, session: OpenSession) -> None:
        """Drops what is kept of a session that has ended."""
        history = self._histories.pop(session.session_id, None)
        for exchange_id in history.turns if history else ():
            self._id_cache.drop(exchange_id)

    def set_delivered(self, session: OpenSession, exchange_id: str, delivered: int) -> None:
        """Corrects how many tokens of a turn were delivered."""
        history = self._histories.get(session.session_id)
        turn = history.turns.get(exchange_id) if history else None
        if turn is not None:
            turn.delivered_tokens = delivered

    async def _load_partial_turns(self, session: OpenSession, history: TurnHistory) -> dict[str, list[int]]:
        """Returns the sampled ids of partly delivered turns, by exchange. There are few, if any."""
        sampled_ids = {}
        for turn in list(history.turns.values()):  # turns may be added meanwhile
            if not turn.is_fully_delivered and turn.delivered_tokens:
                ids = (await self._load_ids(session, turn)).ids
                sampled_ids[turn.exchange_id] = ids[turn.prompt_tokens :].tolist()
        return sampled_ids

    async def _load_ids(self, session: OpenSession, turn: RecordedTurn) -> _ExchangeIds:
        exchange_ids = self._id_cache.get(turn.exchange_id)
        if exchange_ids is None:
            ids = await self._store.read_context_ids(session.session_id, turn.seq)
            exchange_ids = _ExchangeIds(ids, await _encode_ids(ids[: turn.prompt_tokens]))
            self._cache_ids(session, turn.exchange_id, exchange_ids)
        return exchange_ids

    def _cache_ids(self, session: OpenSession, exchange_id: str, exchange_ids: _ExchangeIds) -> None:
        if not session.ended:
            size = exchange_ids.ids.nbytes + len(exchange_ids.prompt_json)
            self._id_cache.put(exchange_id, exchange_ids, size)

    async def _extend_recorded(self, session: OpenSession, prefix: RecordedPrefix, tail: RenderedPrompt) -> TokenPrompt:
        """Builds a prompt from a recorded prefix and the rendered ids behind it."""
        turn = prefix.turn
        recorded = await self._load_ids(session, turn)
        ids = prefix.extend(recorded.ids, tail.ids)
        if prefix.sampled_tokens is None:
            prefix_json, tail_json = _drop_last_ids(recorded.prompt_json, prefix.dropped_tokens), tail.ids_json
        else:
            prefix_json, tail_json = recorded.prompt_json, await _encode_ids(ids[turn.prompt_tokens :])
        return TokenPrompt(ids, b",".join(filter(None, (prefix_json, tail_json))))


def _find_context_length(pool: EnginePool) -> int | None:
    """Returns the longest context length of the replicas, or None if one of them does not report it."""
    lengths = [replica.engine.capabilities.context_length for replica in pool.replicas]
    known = [length for length in lengths if length is not None]
    return max(known) if known and len(known) == len(lengths) else None


def _prepare_request(call: HarnessCall, model: ModelCodec, context_length: int | None) -> Request | None:
    """Returns the request with plain function tools, or None if only the engine can render it. Raises ApiError if it
    can't fit the context."""
    if context_length is not None and not _can_fit(call, model, context_length):
        raise ApiError("context_length", str(ContextExceeded(context_length)))
    return flatten_request(call.request) if is_renderable(call.request) else None


def _can_fit(call: HarnessCall, model: ModelCodec, context_length: int) -> bool:
    """Returns False if the request has more text than the context can hold, whatever the template does with it. The
    model's turns, the tools and white space at the edges don't count, since templates may leave them out."""
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
    """Encodes ids as a JSON list without its brackets."""
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
    """Removes the last `count` numbers of a JSON list."""
    for _ in range(count):
        text = text.rpartition(b",")[0]
    return text


async def parse_chunks(
    chunks: AsyncGenerator[Chunk, None], parser: ReplyParser, request: Request
) -> AsyncGenerator[Chunk, None]:
    """Adds to each chunk of sampled ids the events that they spell."""
    translator = CallTranslator(request.tools)
    stops = StopStringFilter(request.sampling.stop)
    try:
        async for chunk in chunks:
            parsed_events: list[ReplyEvent] = []
            chunk.reasoning_tokens = 0
            for token_id in chunk.ids:
                token_events = parser.feed((token_id,))
                chunk.reasoning_tokens += any(isinstance(event, ReasoningDelta) for event in token_events)
                parsed_events += token_events
            events = translator.translate(parsed_events)
            if chunk.finish_reason is not None:
                events += translator.translate(parser.finish()) + translator.flush()
                chunk.events = stops.feed(events) + stops.finish(chunk.stop_sequence)
            else:
                chunk.events = stops.feed(events)
            yield chunk
    finally:
        await chunks.aclose()
