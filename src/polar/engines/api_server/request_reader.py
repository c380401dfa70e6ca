"""Understands requests of vLLM's API: from the bytes of a body to what is asked of the engine, or to a refusal.

Nothing here touches the event loop; rendering and encoding a long prompt takes milliseconds and belongs in a thread.
"""

from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
import numpy as np

from polar.engines.api_server import wire
from polar.engines.api_server.backend import (
    GenerationRequest,
    RequestError,
    SamplingBackend,
    SamplingOptions,
)
from polar.records.exchange import TokenIds
from polar.rendering.template import TemplateError

T = TypeVar("T")

_COMPLETION_TOKENS = 16  # the completions API's own default
_SEED_MODULUS = 2**63
_MEDIA = ("image_url", "input_audio", "audio_url", "video_url", "file")


def decode_body(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The request can't be read: {error}") from error


class RequestReader:
    def __init__(self, backend: SamplingBackend[Any], model: str) -> None:
        self._backend = backend
        self._tokenizer = backend.tokenizer
        self._model = model

    def read_chat(self, request: wire.ChatRequest) -> GenerationRequest:
        self._check_model(request.model)
        self._backend.check(request)
        prompt = self._render_messages(request)
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        alternatives = (request.top_logprobs or 0) if request.logprobs else None
        read = self._build_request(prompt, request, limit, alternatives, text=True, stream=request.stream)
        read.chat = request
        return read

    def read_completion(self, request: wire.CompletionRequest) -> GenerationRequest:
        self._check_model(request.model)
        self._backend.check(request)
        prompt: object = request.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]  # a batch of one
        if isinstance(prompt, str):
            ids = self._encode_text(prompt, request.add_special_tokens)
        elif isinstance(prompt, list) and all(isinstance(id, int) for id in prompt):
            ids = np.asarray(prompt, np.int32)
        else:
            raise RequestError("A call takes one prompt: a text, or a list of token ids.", "prompt")
        limit = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        return self._build_request(ids, request, limit, request.logprobs, text=True, stream=request.stream)

    def read_generate(self, request: wire.GenerateRequest) -> GenerationRequest:
        self._check_model(request.model)
        sampling = request.sampling_params
        self._backend.check(sampling)
        ids = np.asarray(request.token_ids, np.int32)
        return self._build_request(
            ids, sampling, sampling.max_tokens, sampling.logprobs, text=False, stream=request.stream
        )

    def tokenize(self, request: wire.TokenizeRequest) -> TokenIds:
        self._check_model(request.model)
        if request.messages:
            return self._render_messages(request)
        return self._encode_text(request.prompt or "", request.add_special_tokens is not False)

    def _check_model(self, model: str | None) -> None:
        if model and model != self._model:
            message = f"The model `{model}` does not exist; this engine has `{self._model}`."
            raise RequestError(message, "model", HTTPStatus.NOT_FOUND)

    def _render_messages(self, request: wire.ChatRequest | wire.TokenizeRequest) -> TokenIds:
        if not request.messages:
            raise RequestError("messages must not be empty.", "messages")
        try:
            text = self._tokenizer.template.render(
                [self._normalize_message(message) for message in request.messages],
                request.tools or None,
                request.add_generation_prompt,
                **(request.chat_template_kwargs or {}),
            )
        except TemplateError as error:
            raise RequestError(str(error), "messages") from error
        return self._tokenizer.encode_turns(text)

    def _normalize_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as vLLM gives it to a template: content as one text, reasoning under both of its names."""
        message = dict(message)
        if isinstance(parts := message.get("content"), list):
            for part in parts:
                self._check_part(part)
            message["content"] = join_content_text(parts)
        if reasoning := message.get("reasoning") or message.get("reasoning_content"):
            message["reasoning"] = message["reasoning_content"] = reasoning
        return message

    def _check_part(self, part: Any) -> None:
        if isinstance(part, dict):
            if isinstance(part.get("text"), str):
                return
            if part.get("type") in _MEDIA:
                if self._backend.ignores_media:
                    return
                raise RequestError(f"The {self._backend.name} engine reads text alone.", "messages")
        raise RequestError("A part of a message is text, or media of a known type.", "messages")

    def _encode_text(self, text: str, add_special_tokens: bool) -> TokenIds:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), dtype=np.int32)

    def _build_request(
        self,
        prompt: TokenIds,
        fields: wire.SamplingFields,
        limit: int | None,
        alternatives: int | None,
        *,
        text: bool,
        stream: bool | None,
    ) -> GenerationRequest:
        if not len(prompt) or prompt.max() >= self._backend.vocabulary_size:
            raise RequestError(
                "A prompt of token ids has at least one, and all of them are in the vocabulary.", "prompt"
            )
        return GenerationRequest(
            prompt,
            self._resolve_max_tokens(len(prompt), limit),
            SamplingOptions(
                temperature=1.0 if fields.temperature is None else fields.temperature,
                top_p=1.0 if fields.top_p is None else fields.top_p,
                top_k=max(fields.top_k or 0, 0),  # -1 is vLLM's way to say all
                min_p=fields.min_p or 0.0,
                seed=None if fields.seed is None else fields.seed % _SEED_MODULUS,
                alternatives=alternatives or 0,
            ),
            stop=[one for one in ([fields.stop] if isinstance(fields.stop, str) else fields.stop or ()) if one],
            stop_token_ids=fields.stop_token_ids or (),
            show_stop=fields.include_stop_str_in_output,
            wants_text=text,
            wants_logprobs=alternatives is not None,
            stream=bool(stream),
        )

    def _resolve_max_tokens(self, prompt: int, requested: int | None) -> int:
        if requested is not None and requested < 1:
            raise RequestError(f"max_tokens must be at least 1, got {requested}.", "max_tokens")
        length = self._backend.context_length
        limit = f"This model's maximum context length is {length} tokens. However, "
        if prompt >= length:
            raise RequestError(
                f"{limit}your prompt contains {prompt} input tokens, which exceeds this limit even without any output "
                "tokens. Please reduce the length of the input prompt.",
                "input_tokens",
            )
        if requested is not None and prompt + requested > length:
            raise RequestError(
                f"{limit}you requested {requested} output tokens and your prompt contains {prompt} input tokens, for a "
                f"total of {prompt + requested} tokens. Please reduce the length of the input prompt or the number of "
                "requested output tokens.",
                "max_tokens",
            )
        return length - prompt if requested is None else requested


def join_content_text(content: Any) -> str:
    """A message's text; parts that are no text don't matter here."""
    if isinstance(content, list):
        return "\n".join(
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return content if isinstance(content, str) else ""


def refuse_unsupported(fields: wire.SamplingFields, neutral_values: dict[str, tuple[object, ...]], engine: str) -> None:
    """Refuses a request in which a field of these has another value than those with which it changes nothing."""
    for name, neutral in neutral_values.items():
        if getattr(fields, name, neutral[0]) not in neutral:
            raise RequestError(f"The {engine} engine does not support {name}.", name)
