"""Understands requests: from the bytes of a body to the script that answers it, or to the error that vLLM would give.

Nothing here touches the event loop; rendering and encoding a long prompt takes milliseconds and belongs in a thread.
"""

from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from polar.engines.scripted import wire
from polar.engines.scripted.generation import Bounds, Script, write_script
from polar.engines.scripted.play import PlaySet, TurnContext
from polar.engines.scripted.sampler import Sampler
from polar.engines.scripted.turn_context import TurnContextReader, join_content_text
from polar.rendering.template import TemplateError
from polar.rendering.tokenizer import TokenIds, Tokenizer

T = TypeVar("T")

_COMPLETION_TOKENS = 16  # the completions API's own default
_MEDIA = ("image_url", "input_audio", "audio_url", "video_url", "file")


class RequestError(Exception):
    """An error answer in vLLM's shape."""

    def __init__(self, message: str, param: str | None = None, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        name = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
        self.status = status
        self.body = msgspec.json.encode(wire.ErrorReply(wire.ErrorInfo(message, name, param, status.value)))


def decode_body(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The request can't be read: {error}") from error


class _GenerationFields(Protocol):
    """What all generating requests have in common."""

    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    include_stop_str_in_output: bool
    seed: int | None
    n: int | None


class RequestReader:
    def __init__(self, tokenizer: Tokenizer, plays: PlaySet, sampler: Sampler, model: str, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._plays = plays
        self._sampler = sampler
        self._context_reader = TurnContextReader(plays, tokenizer)
        self._model = model
        self._max_model_len = max_model_len

    def read_chat(self, request: wire.ChatRequest) -> Script:
        self._check_model(request.model)
        prompt = self._render_messages(request)
        scene = self._context_reader.read_messages(request.messages, request.callable_tools, prompt)
        scene.forced_tool = _find_forced_tool(request.tool_choice)
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        return self._make_script(prompt, scene, limit, request)

    def read_completion(self, request: wire.CompletionRequest) -> Script:
        self._check_model(request.model)
        prompt: object = request.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]  # a batch of one
        if isinstance(prompt, str):
            ids = self._encode_text(prompt, request.add_special_tokens)
        elif isinstance(prompt, list) and all(isinstance(id, int) for id in prompt):
            ids = self._check_ids(prompt)
        else:
            raise RequestError("The scripted engine takes one prompt: a text, or a list of token ids.", "prompt")
        limit = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        return self._make_script(ids, self._context_reader.read_ids(ids), limit, request)

    def read_generate(self, request: wire.GenerateRequest) -> Script:
        self._check_model(request.model)
        prompt = self._check_ids(request.token_ids)
        return self._make_script(
            prompt, self._context_reader.read_ids(prompt), request.sampling_params.max_tokens, request.sampling_params
        )

    def tokenize(self, request: wire.TokenizeRequest) -> TokenIds:
        self._check_model(request.model)
        if request.messages:
            return self._render_messages(request)
        return self._encode_text(request.prompt or "", request.add_special_tokens is not False)

    def _check_model(self, model: str | None) -> None:
        if model and model != self._model:
            message = f"The model `{model}` does not exist. Valid aliases: {self._model}."
            raise RequestError(message, "model", HTTPStatus.NOT_FOUND)

    def _render_messages(self, request: wire.ChatRequest | wire.TokenizeRequest) -> TokenIds:
        if not request.messages:
            raise RequestError("messages must not be empty.", "messages")
        try:
            text = self._tokenizer.template.render(
                [_normalize_message(message) for message in request.messages],
                request.tools or None,
                request.add_generation_prompt,
                **(request.chat_template_kwargs or {}),
            )
        except TemplateError as error:
            raise RequestError(str(error), "messages") from error
        return self._tokenizer.encode_turns(text)

    def _encode_text(self, text: str, add_special_tokens: bool) -> TokenIds:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), dtype=np.int32)

    def _check_ids(self, ids: list[int]) -> TokenIds:
        array = np.asarray(ids, dtype=np.int32)
        if not len(array) or array.max() >= self._tokenizer.vocabulary_size:
            raise RequestError(
                "A prompt of token ids has at least one, and all of them are in the vocabulary.", "prompt"
            )
        return array

    def _make_script(
        self, prompt: TokenIds, context: TurnContext, limit: int | None, fields: _GenerationFields
    ) -> Script:
        if fields.n not in (None, 1):
            raise RequestError("The scripted engine gives one choice: n must be 1.", "n")
        bounds = Bounds(
            self._resolve_max_tokens(len(prompt), limit),
            [fields.stop] if isinstance(fields.stop, str) else fields.stop or (),
            fields.stop_token_ids or (),
            fields.include_stop_str_in_output,
        )
        turn = self._plays.next_turn(context)
        return write_script(self._tokenizer, self._sampler, prompt, context, turn, bounds, fields.seed or 0)

    def _resolve_max_tokens(self, prompt: int, requested: int | None) -> int:
        if requested is not None and requested < 1:
            raise RequestError(f"max_tokens must be at least 1, got {requested}.", "max_tokens")
        limit = f"This model's maximum context length is {self._max_model_len} tokens. However, "
        if prompt >= self._max_model_len:
            raise RequestError(
                f"{limit}your prompt contains {prompt} input tokens, which exceeds this limit even without any output "
                "tokens. Please reduce the length of the input prompt.",
                "input_tokens",
            )
        if requested is not None and prompt + requested > self._max_model_len:
            raise RequestError(
                f"{limit}you requested {requested} output tokens and your prompt contains {prompt} input tokens, for a "
                f"total of {prompt + requested} tokens. Please reduce the length of the input prompt or the number of "
                "requested output tokens.",
                "max_tokens",
            )
        return self._max_model_len - prompt if requested is None else requested


def _find_forced_tool(choice: str | dict[str, Any] | None) -> str | None:
    if choice == "required":
        return ""
    function = choice.get("function") if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _normalize_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM gives it to a template: content as one text, reasoning under both of its names. Pictures and
    the like are taken, and not looked at."""
    message = dict(message)
    if isinstance(parts := message.get("content"), list):
        for part in parts:
            if not isinstance(part, dict) or not (isinstance(part.get("text"), str) or part.get("type") in _MEDIA):
                raise RequestError("A part of a message is text, or media of a known type.", "messages")
        message["content"] = join_content_text(parts)
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        message["reasoning"] = message["reasoning_content"] = reasoning
    return message
