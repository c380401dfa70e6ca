"""Understands requests: from the bytes of a body to the script that answers it, or to the error that vLLM would give.

Nothing here touches the event loop; rendering and encoding a long prompt takes milliseconds and belongs in a thread.
"""

from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from polar.engines.scripted import wire
from polar.engines.scripted.generation import Bounds, Script, write_script
from polar.engines.scripted.play import Plays, Scene
from polar.engines.scripted.sampler import Sampler
from polar.engines.scripted.scene import Scenes, content_text
from polar.rendering.template import TemplateError
from polar.rendering.tokenizer import Ids, Tokenizer

T = TypeVar("T")

_COMPLETION_TOKENS = 16  # the completions API's own default
_MEDIA = ("image_url", "input_audio", "audio_url", "video_url", "file")


class Refusal(Exception):
    """An error answer in vLLM's shape."""

    def __init__(self, message: str, param: str | None = None, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        name = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
        self.status = status
        self.body = msgspec.json.encode(wire.ErrorReply(wire.ErrorInfo(message, name, param, status.value)))


def read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(f"The request can't be read: {error}") from error


class _Generating(Protocol):
    """What all generating requests have in common."""

    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    include_stop_str_in_output: bool
    seed: int | None
    n: int | None


class Reader:
    def __init__(self, tokenizer: Tokenizer, plays: Plays, sampler: Sampler, model: str, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._plays = plays
        self._sampler = sampler
        self._scenes = Scenes(plays, tokenizer)
        self._model = model
        self._max_model_len = max_model_len

    def chat(self, asked: wire.ChatRequest) -> Script:
        self._check_model(asked.model)
        prompt = self._rendered(asked)
        scene = self._scenes.of_messages(asked.messages, asked.callable_tools, prompt)
        scene.forced = _forced_tool(asked.tool_choice)
        limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        return self._script(prompt, scene, limit, asked)

    def completion(self, asked: wire.CompletionRequest) -> Script:
        self._check_model(asked.model)
        prompt: object = asked.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]  # a batch of one
        if isinstance(prompt, str):
            ids = self._encoded(prompt, asked.add_special_tokens)
        elif isinstance(prompt, list) and all(isinstance(id, int) for id in prompt):
            ids = self._checked(prompt)
        else:
            raise Refusal("The scripted engine takes one prompt: a text, or a list of token ids.", "prompt")
        limit = _COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        return self._script(ids, self._scenes.of_ids(ids), limit, asked)

    def generate(self, asked: wire.GenerateRequest) -> Script:
        self._check_model(asked.model)
        prompt = self._checked(asked.token_ids)
        return self._script(
            prompt, self._scenes.of_ids(prompt), asked.sampling_params.max_tokens, asked.sampling_params
        )

    def tokenize(self, asked: wire.TokenizeRequest) -> Ids:
        self._check_model(asked.model)
        if asked.messages:
            return self._rendered(asked)
        return self._encoded(asked.prompt or "", asked.add_special_tokens is not False)

    def _check_model(self, model: str | None) -> None:
        if model and model != self._model:
            message = f"The model `{model}` does not exist. Valid aliases: {self._model}."
            raise Refusal(message, "model", HTTPStatus.NOT_FOUND)

    def _rendered(self, asked: wire.ChatRequest | wire.TokenizeRequest) -> Ids:
        if not asked.messages:
            raise Refusal("messages must not be empty.", "messages")
        try:
            text = self._tokenizer.template.render(
                [_plain(message) for message in asked.messages],
                asked.tools or None,
                asked.add_generation_prompt,
                **(asked.chat_template_kwargs or {}),
            )
        except TemplateError as error:
            raise Refusal(str(error), "messages") from error
        return self._tokenizer.encode_turns(text)

    def _encoded(self, text: str, add_special_tokens: bool) -> Ids:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), dtype=np.int32)

    def _checked(self, ids: list[int]) -> Ids:
        array = np.asarray(ids, dtype=np.int32)
        if not len(array) or array.max() >= self._tokenizer.vocabulary_size:
            raise Refusal("A prompt of token ids has at least one, and all of them are in the vocabulary.", "prompt")
        return array

    def _script(self, prompt: Ids, scene: Scene, limit: int | None, asked: _Generating) -> Script:
        if asked.n not in (None, 1):
            raise Refusal("The scripted engine gives one choice: n must be 1.", "n")
        bounds = Bounds(
            self._max_tokens(len(prompt), limit),
            [asked.stop] if isinstance(asked.stop, str) else asked.stop or (),
            asked.stop_token_ids or (),
            asked.include_stop_str_in_output,
        )
        turn = self._plays.next(scene)
        return write_script(self._tokenizer, self._sampler, prompt, scene, turn, bounds, asked.seed or 0)

    def _max_tokens(self, prompt: int, asked: int | None) -> int:
        if asked is not None and asked < 1:
            raise Refusal(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
        limit = f"This model's maximum context length is {self._max_model_len} tokens. However, "
        if prompt >= self._max_model_len:
            raise Refusal(
                f"{limit}your prompt contains {prompt} input tokens, which exceeds this limit even without any output "
                "tokens. Please reduce the length of the input prompt.",
                "input_tokens",
            )
        if asked is not None and prompt + asked > self._max_model_len:
            raise Refusal(
                f"{limit}you requested {asked} output tokens and your prompt contains {prompt} input tokens, for a "
                f"total of {prompt + asked} tokens. Please reduce the length of the input prompt or the number of "
                "requested output tokens.",
                "max_tokens",
            )
        return self._max_model_len - prompt if asked is None else asked


def _forced_tool(choice: str | dict[str, Any] | None) -> str | None:
    if choice == "required":
        return ""
    function = choice.get("function") if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM gives it to a template: content as one text, reasoning under both of its names. Pictures and
    the like are taken, and not looked at."""
    message = dict(message)
    if isinstance(parts := message.get("content"), list):
        for part in parts:
            if not isinstance(part, dict) or not (isinstance(part.get("text"), str) or part.get("type") in _MEDIA):
                raise Refusal("A part of a message is text, or media of a known type.", "messages")
        message["content"] = content_text(parts)
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        message["reasoning"] = message["reasoning_content"] = reasoning
    return message
