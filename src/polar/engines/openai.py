"""Any OpenAI-compatible chat endpoint, and the common part of `vllm` and `sglang`.

The engine renders and parses; we ask it for token ids and log-probabilities beside the text and take them as it reports
them. Calls without ids are captured as text and marked as untrainable. A stream is handed on chunk by chunk as it
comes; the prompt's ids, which can be long, are handed on unparsed.
"""

from collections.abc import AsyncGenerator

import aiohttp
import msgspec

from polar.config import EngineSettings
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_completions import OpenAICompletions
from polar.dialects.sse import EventParser
from polar.engines import chat_wire as w
from polar.engines.base import Capabilities, Chunk, EngineState, TokenPrompt, normalize_engine_url
from polar.engines.http_client import EngineHttpClient, excerpt, mentions_token_limit
from polar.engines.tools import CallTranslator, flatten_request
from polar.errors import EngineError
from polar.types import Request, SamplingParams, TextDelta, Usage


class OpenAIEngine:
    """One replica. Log-probabilities are asked for unless the settings say `logprobs = false`. Subclasses say what
    their server can do beyond OpenAI's API."""

    extra_fields: bytes = b""
    """JSON members that every call carries, without braces."""

    capabilities = Capabilities(logprobs="raw")

    def __init__(self, url: str, settings: EngineSettings) -> None:
        self.url = normalize_engine_url(url)
        self.model = settings.model
        self._settings = settings
        self._root: str | None = None  # where the server says that it has the model from
        self._dialect = OpenAIChat()
        self._completions = OpenAICompletions()
        self._http = EngineHttpClient(self.url, settings.api_key, settings.timeout)

    async def start(self) -> Capabilities:
        body = await self._http.request("GET", "/v1/models")
        try:
            model_cards = w.model_list_decoder.decode(body).data
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{self.url} does not list its models: {error}. Is it an inference engine?") from error
        names = [model.id for model in model_cards]
        if self.model is None:
            if not names:
                raise EngineError(f"{self.url} serves no model: set [engine] model.")
            self.model = names[0]
        own = next((model for model in model_cards if model.id == self.model), None)
        self.capabilities = msgspec.structs.replace(
            self.capabilities, models=names, context_length=own.max_model_len if own else None
        )
        self._root = own.root if own else None
        return self.capabilities

    async def generate(
        self, request: Request, *, stream: bool, prompt: TokenPrompt | None = None
    ) -> AsyncGenerator[Chunk, None]:
        if prompt is not None:
            raise EngineError(f"{self.url} takes no token ids.", kind="unsupported")
        if self.model is None:
            await self.start()
        call = self.prepare(flatten_request(request), stream)
        translator = CallTranslator(request.tools)
        wants_logprobs = request.logprobs is not None
        response = await self._post_call(call)
        try:
            if stream:
                async for chunk in self._stream(response, translator, wants_logprobs):
                    yield chunk
            else:
                body = await self._http.read(response)
                try:
                    chunk = self._parse_reply(body, translator, wants_logprobs)
                except ValueError as error:
                    raise self._http.error_from_exception(error) from error
                yield chunk
        finally:
            response.close()

    async def _post_call(self, call: Request) -> aiohttp.ClientResponse:
        """The engine's answer, once it has begun to sample."""
        path = "/v1/chat/completions" if call.prompt is None else "/v1/completions"
        response = await self._http.post(path, self.encode(call))
        if response.status == 200:
            return response
        refusal = await self._http.read(response)
        if response.status == 400 and call.sampling.max_tokens is not None and mentions_token_limit(refusal):
            # More tokens were asked for than the context has room for? Then leave the limit to the engine, whose own
            # is the room that is left. If it is the prompt that is too long, the engine says so again.
            call.sampling = msgspec.structs.replace(call.sampling, max_tokens=None)
            return await self._post_call(call)
        raise self._http.error_from_response(response.status, refusal, response.headers.get("Retry-After"))

    def find_tokenizer_folder(self) -> str | None:
        return self._settings.tokenizer

    async def count_tokens(self, request: Request) -> int:  # noqa: ARG002
        raise EngineError(
            f"{self.url} can't count tokens: an engine of kind vllm or sglang can.",
            kind="unsupported",
        )

    async def tokenize(self, text: str) -> list[int] | None:  # noqa: ARG002
        return None

    async def reports_version_spans(self) -> bool:
        return False

    async def count_running_calls(self) -> int | None:
        return None

    @property
    def connections_opened(self) -> int:
        return self._http.connections_opened

    async def get_process_start_time(self) -> float | None:
        return None

    async def get_state(self) -> EngineState | None:
        return None

    async def freeze(self) -> bool:
        return False

    async def thaw(self) -> None:
        return None

    async def sleep(self) -> bool:
        return False

    async def wake(self) -> None:
        return None

    async def close(self) -> None:
        await self._http.close()

    # What subclasses change

    def prepare(self, request: Request, stream: bool) -> Request:
        """The request as this server should get it: its own model name, log-probabilities asked for."""
        logprobs = request.logprobs
        if logprobs is None and self._settings.logprobs and self.capabilities.logprobs != "none":
            logprobs = 0
        assert self.model is not None
        return msgspec.structs.replace(
            request,
            model=self.model,
            stream=stream,
            stream_usage=True,
            logprobs=logprobs,
            sampling=self.apply_sampling_defaults(request.sampling),
        )

    def apply_sampling_defaults(self, sampling: SamplingParams) -> SamplingParams:
        """Sampling with the provider's defaults made explicit, so that what is recorded is what was used."""
        limit, context = sampling.max_tokens, self.capabilities.context_length
        return msgspec.structs.replace(
            sampling,
            max_tokens=None if limit and context and limit >= context else limit,  # the context is the tighter limit
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
        )

    def encode(self, request: Request) -> bytes:
        dialect = self._dialect if request.prompt is None else self._completions
        body = dialect.encode_request(request)
        return body[:-1] + b"," + self.extra_fields + b"}" if self.extra_fields else body

    # Replies

    async def _stream(
        self, response: aiohttp.ClientResponse, translator: CallTranslator, wants_logprobs: bool
    ) -> AsyncGenerator[Chunk, None]:
        parser = EventParser()
        events = w.EventDecoder()
        finished = False
        try:
            async for piece in response.content.iter_any():
                for data in parser.feed(piece):
                    if data == b"[DONE]":
                        continue
                    reply, prompt = w.read_reply(data)
                    if reply.error != w.JSON_NULL:
                        raise self._http.error_from_response(500, bytes(reply.error))
                    chunk = Chunk()
                    if prompt is not None:
                        chunk.prompt_json = prompt
                        chunk.usage = Usage(prompt=w.count_json_ids(prompt))
                    if reply.usage is not None:
                        chunk.usage = w.to_usage(reply.usage)
                    if reply.choices:
                        choice = reply.choices[0]
                        if choice.text:
                            chunk.events = [TextDelta(choice.text)]
                        elif choice.delta is not None:
                            chunk.events = translator.translate(events.decode_turn(choice.delta))
                        w.fill_chunk(chunk, choice)
                        if wants_logprobs:
                            chunk.alternatives = w.read_text_alternatives(data)
                        if choice.finish_reason:
                            finished = True
                            chunk.events += translator.flush()
                    yield chunk
        except ValueError as error:
            raise self._http.error_from_exception(error) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            if not finished:  # else all was said before the connection broke
                raise self._http.error_from_exception(error) from error
        if not finished:
            raise EngineError(f"{self.url} ended its stream without a finish reason.")

    def _parse_reply(self, body: bytes, translator: CallTranslator, wants_logprobs: bool) -> Chunk:
        reply, prompt = w.read_reply(body)
        choice = reply.choices[0] if reply.choices else w.Choice()
        turn = choice.message if choice.text is None else w.MessageOrDelta(content=choice.text)
        if turn is None:
            raise EngineError(f"{self.url} answered without a message: {excerpt(body)}")
        for index, call in enumerate(turn.tool_calls or ()):
            call.index = index  # whole replies need not number their calls
        chunk = Chunk(usage=w.to_usage(reply.usage) if reply.usage else None, prompt_json=prompt)
        chunk.events = translator.translate(w.EventDecoder().decode_turn(turn)) + translator.flush()
        w.fill_chunk(chunk, choice)
        if wants_logprobs:
            chunk.alternatives = w.read_text_alternatives(body)
        if chunk.finish_reason is None:
            chunk.finish_reason = "stop"
        return chunk
