"""An engine behind an OpenAI-compatible chat endpoint: the common part of `vllm`, `sglang` and `openai`.

The engine renders and parses; we ask it for token ids and log-probabilities beside the text and take them as it reports
them. A stream is handed on chunk by chunk as it comes; the prompt's ids, which can be long, are handed on unparsed.
"""

import json
from collections.abc import AsyncGenerator
from typing import TypeVar

import aiohttp
import msgspec
import numpy as np
from msgspec import Raw, Struct

from polar.config import EngineSettings
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_completions import OpenAICompletions
from polar.dialects.sse import Parser
from polar.engines.base import Capabilities, Chunk
from polar.engines.tools import CallTranslator, flatten
from polar.errors import ApiErrorKind, EngineError
from polar.types import (
    CallDelta,
    CallStart,
    Event,
    FinishReason,
    ReasoningDelta,
    Request,
    Sampling,
    TextDelta,
    TokenLogprob,
    Usage,
)

T = TypeVar("T")

_NULL = Raw(b"null")

# The reply's wire format, as far as it matters here. Fields that are not named are skipped by the decoder. Nothing here
# can be part of a cycle, and there is much of it: the garbage collector need not look.


class _Logprob(Struct, gc=False):
    logprob: float | None = None


class _Logprobs(Struct, gc=False):
    content: list[_Logprob] | None = None
    token_logprobs: list[float | None] | None = None  # legacy completions


class _FullToken(Struct, gc=False):
    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list["_FullToken"] = msgspec.field(default_factory=list)


class _FullLogprobs(Struct, gc=False):
    content: list[_FullToken] | None = None
    tokens: list[str] = msgspec.field(default_factory=list)  # legacy completions have columns
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _FullChoice(Struct, gc=False):
    logprobs: _FullLogprobs | None = None


class _FullReply(Struct, gc=False):
    """The same once more, for a harness that wants to see log-probabilities with their alternatives."""

    choices: list[_FullChoice] = msgspec.field(default_factory=list)


class _SampledToken(Struct, array_like=True, gc=False):
    logprob: float | None
    id: int


class _MetaInfo(Struct, gc=False):
    output_token_logprobs: list[_SampledToken] | None = None


class _Function(Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct, gc=False):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Turn(Struct, gc=False):
    """A whole message, or the delta of one: the fields are the same."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    refusal: str | None = None


class _Choice(Struct, gc=False):
    index: int = 0
    delta: _Turn | None = None
    message: _Turn | None = None
    text: str | None = None  # legacy completions
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: Raw = _NULL  # SGLang has them here, vLLM on top
    meta_info: _MetaInfo | None = None  # SGLang
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _CachedTokens(Struct, gc=False):
    cached_tokens: int | None = None


class _ReasoningTokens(Struct, gc=False):
    reasoning_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None
    completion_tokens_details: _ReasoningTokens | None = None


class _Reply(Struct, gc=False):
    """A whole completion, or one chunk of a stream."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    prompt_token_ids: Raw = _NULL
    error: Raw = _NULL


class _Model(Struct, gc=False):
    id: str
    max_model_len: int | None = None


class _Models(Struct, gc=False):
    data: list[_Model] = msgspec.field(default_factory=list)


_reply = msgspec.json.Decoder(_Reply)
_full_reply = msgspec.json.Decoder(_FullReply)
_ids = msgspec.json.Decoder(list[int])
_models = msgspec.json.Decoder(_Models)

_FINISH: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "abort": "abort",
    "error": "abort",  # the engine gave up by itself: no end that the model chose
}

_KINDS: dict[int, ApiErrorKind] = {
    400: "invalid_request",
    408: "timeout",
    413: "too_large",
    422: "invalid_request",
    429: "rate_limit",
    503: "overloaded",
    504: "timeout",
}

_CONTEXT_WORDS = (b"context length", b"context_length", b"context window", b"maximum input length", b"too many tokens")
_LIMIT_WORDS = (b"max_tokens", b"max_completion_tokens", b"max_model_len")


class ChatEngine:
    """One replica. Subclasses say what their server can do beyond OpenAI's API."""

    extra_fields: bytes = b""
    """JSON members that every call carries, without braces."""

    capabilities = Capabilities()

    def __init__(self, url: str, settings: EngineSettings) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = settings.model
        self._settings = settings
        self._dialect = OpenAIChat()
        self._completions = OpenAICompletions()
        headers = {"Content-Type": "application/json"}
        if settings.api_key:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        self._headers = headers
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> Capabilities:
        body = await self._request("GET", "/v1/models")
        try:
            listed = _models.decode(body).data
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.url} does not list its models: {error}. Is it an inference engine?") from error
        names = [model.id for model in listed]
        if self.model is None:
            if not names:
                raise EngineError(f"{self.url} serves no model: set [engine] model.")
            self.model = names[0]
        lengths = [model.max_model_len for model in listed if model.id == self.model]
        self.capabilities = msgspec.structs.replace(
            self.capabilities, models=names, context_length=lengths[0] if lengths else None
        )
        return self.capabilities

    async def generate(self, request: Request, *, stream: bool) -> AsyncGenerator[Chunk, None]:
        if self.model is None:
            await self.start()
        call = self.prepare(flatten(request), stream)
        translator = CallTranslator(request.tools)
        wants = request.logprobs is not None
        response = await self._accepted(call)
        try:
            if stream:
                async for chunk in self._stream(response, translator, wants):
                    yield chunk
            else:
                body = await self._read(response)
                try:
                    chunk = self._whole(body, translator, wants)
                except ValueError as error:
                    raise self._broken(error) from error
                yield chunk
        finally:
            response.close()

    async def _accepted(self, call: Request) -> aiohttp.ClientResponse:
        """The engine's answer, once it has begun to sample."""
        path = "/v1/chat/completions" if call.prompt is None else "/v1/completions"
        response = await self._open(path, self.encode(call))
        if response.status == 200:
            return response
        refusal = await self._read(response)
        if response.status == 400 and call.sampling.max_tokens is not None and _about_length(refusal):
            # More tokens were asked for than the context has room for? Then leave the limit to the engine, whose own
            # is the room that is left. If it is the prompt that is too long, the engine says so again.
            call.sampling = msgspec.structs.replace(call.sampling, max_tokens=None)
            return await self._accepted(call)
        raise self._refused(response.status, refusal)

    async def count_tokens(self, request: Request) -> int:  # noqa: ARG002
        raise EngineError(
            f"{self.url} can't count tokens: set [engine] tokenizer, or use an engine with /tokenize.",
            kind="unsupported",
        )

    async def version_spans(self) -> bool:
        return False

    async def running(self) -> int | None:
        return None

    async def freeze(self) -> bool:
        return False

    async def thaw(self) -> None:
        return None

    async def healthy(self) -> bool:
        try:
            await self._request("GET", "/v1/models", timeout=5)
        except EngineError:
            return False
        return True

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    # What subclasses change

    def prepare(self, request: Request, stream: bool) -> Request:
        """The request as this server should get it: its own model name, log-probabilities asked for."""
        logprobs = request.logprobs
        if logprobs is None and self._settings.logprobs and self.capabilities.logprobs != "none":
            logprobs = 0
        assert self.model is not None
        sampling = self.defaults(request.sampling)
        context = self.capabilities.context_length
        if context is not None and sampling.max_tokens is not None and sampling.max_tokens >= context:
            sampling.max_tokens = None  # no limit is tighter than the context's own
        return msgspec.structs.replace(
            request, model=self.model, stream=stream, stream_usage=True, logprobs=logprobs, sampling=sampling
        )

    def defaults(self, sampling: Sampling) -> Sampling:
        """Sampling with the provider's defaults made explicit, so that what is recorded is what was used."""
        return msgspec.structs.replace(
            sampling,
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
        )

    def encode(self, request: Request) -> bytes:
        dialect = self._dialect if request.prompt is None else self._completions
        body = dialect.encode_request(request)
        return body[:-1] + b"," + self.extra_fields + b"}" if self.extra_fields else body

    # Replies

    async def _stream(
        self, response: aiohttp.ClientResponse, translator: CallTranslator, wants: bool
    ) -> AsyncGenerator[Chunk, None]:
        parser = Parser()
        calls = -1
        finished = False
        try:
            async for piece in response.content.iter_any():
                for data in parser.feed(piece):
                    if data == b"[DONE]":
                        continue
                    reply, prompt = _read(data)
                    if reply.error != _NULL:
                        raise self._refused(500, bytes(reply.error))
                    chunk = Chunk()
                    if prompt is not None:
                        chunk.prompt_json = prompt
                        chunk.usage = Usage(prompt=_count(prompt))
                    if reply.usage is not None:
                        chunk.usage = _usage(reply.usage)
                    if reply.choices:
                        choice = reply.choices[0]
                        if choice.text:
                            chunk.events = [TextDelta(choice.text)]
                        elif choice.delta is not None:
                            events, calls = _events(choice.delta, calls)
                            chunk.events = translator.translate(events)
                        _fill(chunk, choice)
                        if wants:
                            chunk.alternatives = _alternatives(data)
                        if choice.finish_reason:
                            finished = True
                            chunk.events += translator.flush()
                    yield chunk
        except ValueError as error:
            raise self._broken(error) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            if not finished:  # else all was said before the connection broke
                raise self._broken(error) from error
        if not finished:
            raise EngineError(f"{self.url} ended its stream without a finish reason.")

    def _whole(self, body: bytes, translator: CallTranslator, wants: bool) -> Chunk:
        reply, prompt = _read(body)
        choice = reply.choices[0] if reply.choices else _Choice()
        turn = choice.message if choice.text is None else _Turn(content=choice.text)
        if turn is None:
            raise EngineError(f"{self.url} answered without a message: {_excerpt(body)}")
        for index, call in enumerate(turn.tool_calls or ()):
            call.index = index  # whole replies need not number their calls
        chunk = Chunk(usage=_usage(reply.usage) if reply.usage else None, prompt_json=prompt)
        events, _ = _events(turn, -1)
        chunk.events = translator.translate(events) + translator.flush()
        _fill(chunk, choice)
        if wants:
            chunk.alternatives = _alternatives(body)
        if chunk.finish_reason is None:
            chunk.finish_reason = "stop"
        return chunk

    # HTTP

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self._settings.timeout),
                headers=self._headers,
                read_bufsize=2**20,
                auto_decompress=True,
            )
        return self._http

    async def _open(self, path: str, body: bytes) -> aiohttp.ClientResponse:
        try:
            try:
                return await self._post(path, body)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    raise
                # Most likely a kept connection that the server closed, being idle, just as we used it: once more.
                return await self._post(path, body)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broken(error) from error

    async def _post(self, path: str, body: bytes) -> aiohttp.ClientResponse:
        # Redirects are refused: prompts and keys go only where somebody said that they should.
        return await self._session().post(self.url + path, data=body, allow_redirects=False)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            async with response:
                return await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broken(error) from error

    async def _request(self, method: str, path: str, body: bytes | None = None, timeout: float = 30) -> bytes:
        """A small call beside sampling: the answer's body."""
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session().request(
                method, self.url + path, data=body, timeout=limit, allow_redirects=False
            ) as response:
                text = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._broken(error) from error
        if response.status >= 300:
            raise self._refused(response.status, text)
        return text

    def _broken(self, error: Exception) -> EngineError:
        what = str(error) or type(error).__name__
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
            return EngineError(f"{self.url} did not answer in time.", kind="timeout", elsewhere=True)
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return EngineError(f"{self.url} can't be reached: {what}.", kind="overloaded", elsewhere=True)
        if isinstance(error, aiohttp.ServerTimeoutError):
            return EngineError(f"{self.url} fell silent for {self._settings.timeout:g} s.", kind="timeout")
        if isinstance(error, ValueError):
            return EngineError(f"{self.url} answered something that is no chat completion: {what}.")
        return EngineError(f"The connection to {self.url} broke: {what}.", elsewhere=True)

    def _refused(self, status: int, body: bytes) -> EngineError:
        kind: ApiErrorKind = _KINDS.get(status, "engine")
        if status == 400 and _about_context(body):
            kind = "context_length"
        message = _message(body)
        return EngineError(
            f"The engine answered {status}: {message}", kind=kind, elsewhere=status in (429, 500, 502, 503)
        )


def _decode(decoder: "msgspec.json.Decoder[T]", data: bytes) -> T:
    """Raises ValueError (of which msgspec's errors are) where this is no reply."""
    try:
        try:
            return decoder.decode(data)
        except msgspec.DecodeError:
            # NaN and Infinity are no JSON, but engines write them. A log-probability that is none makes the call
            # untrainable, not unusable: such values become null, and the checks at capture say why.
            tolerant = json.loads(data, parse_constant=lambda _: None)
            return decoder.decode(msgspec.json.encode(tolerant))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _events(turn: _Turn, calls: int) -> tuple[list[Event], int]:
    """The events of a turn or delta; `calls` is the index of the call that is open, -1 for none."""
    events: list[Event] = []
    if thinking := turn.reasoning_content or turn.reasoning:
        events.append(ReasoningDelta(thinking))
    if text := turn.content or turn.refusal:
        events.append(TextDelta(text))
    for call in turn.tool_calls or ():
        if call.index > calls:
            calls = call.index
            events.append(CallStart(call.id or "", call.function.name or ""))
        elif call.index < calls or calls < 0:
            raise ValueError("tool calls whose pieces are mixed")
        if call.function.arguments:
            events.append(CallDelta(call.function.arguments))
    return events, calls


def _fill(chunk: Chunk, choice: _Choice) -> None:
    """Ids, log-probabilities and the end, from a choice."""
    if choice.meta_info is not None and choice.meta_info.output_token_logprobs is not None:
        sampled = choice.meta_info.output_token_logprobs
        chunk.ids = [token.id for token in sampled]
        chunk.logprobs = [token.logprob for token in sampled]
    else:
        if choice.token_ids:
            chunk.ids = choice.token_ids
        if choice.logprobs is not None:
            content = choice.logprobs.content
            chunk.logprobs = choice.logprobs.token_logprobs if content is None else [token.logprob for token in content]
    if choice.finish_reason:
        chunk.finish_reason = _FINISH.get(choice.finish_reason, "stop")
        if isinstance(choice.stop_reason, str):
            chunk.stop_sequence = choice.stop_reason


def _alternatives(data: bytes) -> list[TokenLogprob] | None:
    choices = _decode(_full_reply, data).choices
    found = choices[0].logprobs if choices else None
    if found is None or found.content is not None:
        return [_shown(token) for token in found.content] if found and found.content else None
    tops = found.top_logprobs or [None] * len(found.tokens)
    return [
        _shown(_FullToken(token, logprob, None, [_FullToken(*other) for other in (top or {}).items()]))
        for token, logprob, top in zip(found.tokens, found.token_logprobs, tops, strict=False)
    ]


def _shown(token: _FullToken) -> TokenLogprob:
    """Where there is no log-probability, a harness gets the number that OpenAI has for this."""
    logprob = -9999.0 if token.logprob is None else token.logprob
    return TokenLogprob(token.token, logprob, token.bytes, [_shown(other) for other in token.top_logprobs])


def _usage(usage: _Usage) -> Usage:
    cached, thinking = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        prompt=_counted(usage.prompt_tokens),
        completion=_counted(usage.completion_tokens),
        cached=_counted(cached.cached_tokens) if cached else 0,
        reasoning=_counted(thinking.reasoning_tokens) if thinking else 0,
    )


def _counted(tokens: int | None) -> int:
    return max(tokens or 0, 0)


_PROMPT = b'"prompt_token_ids":['


def _read(data: bytes) -> tuple[_Reply, bytes | None]:
    """A reply, and its prompt's ids as they stand there.

    They are most of what an engine sends, so they are cut out before the rest is decoded. Within a JSON string the
    quotes of `_PROMPT` would be escaped: what is found is the member itself.
    """
    start = data.find(_PROMPT)
    end = data.find(b"]", start)
    if start < 0 or end < 0:
        reply = _decode(_reply, data)
        loose = reply.prompt_token_ids  # where white space stands in between, say
        if loose == _NULL and reply.choices:
            loose = reply.choices[0].prompt_token_ids
        return reply, None if loose == _NULL else bytes(loose)
    opening = start + len(_PROMPT) - 1
    return _decode(_reply, data[:opening] + b"null" + data[end + 1 :]), data[opening : end + 1]


def _count(ids: bytes) -> int:
    """The length of a list of numbers, without reading it."""
    return int(np.count_nonzero(np.frombuffer(ids, np.uint8) == ord(","))) + 1 if len(ids) > 2 else 0


def _about_context(body: bytes) -> bool:
    lower = body.lower()
    return any(words in lower for words in _CONTEXT_WORDS)


def _about_length(body: bytes) -> bool:
    return _about_context(body) or any(words in body for words in _LIMIT_WORDS)


class _ErrorBody(Struct, gc=False):
    message: str | None = None
    detail: str | None = None
    error: "_ErrorBody | str | None" = None


def _message(body: bytes) -> str:
    """What an engine says is wrong, out of the shapes in use."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except (ValueError, RecursionError):
        return _excerpt(body)
    if isinstance(found.error, _ErrorBody):
        found = found.error
    return found.message or found.detail or (found.error if isinstance(found.error, str) else None) or _excerpt(body)


def _excerpt(body: bytes) -> str:
    text = body[:300].decode("utf-8", "replace").strip()
    return text or "(nothing)"
