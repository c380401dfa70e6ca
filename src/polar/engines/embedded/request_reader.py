"""Understands requests of vLLM's API: from the bytes of a body to what is asked of the model, or to a refusal.

What would change the sampling and is not supported is refused, never left out. Nothing here touches the event loop.
"""

from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from polar.engines.embedded.generation import GenerationRequest, SamplingOptions
from polar.engines.scripted.wire import ErrorInfo, ErrorReply, StreamOptions, TokenizeRequest
from polar.rendering.template import TemplateError
from polar.rendering.tokenizer import Tokenizer

T = TypeVar("T")

NeutralValues = dict[str, tuple[object, ...]]
"""Parameters that are not supported, and the values with which they change nothing."""

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
_COMPLETION_TOKENS = 16  # the completions API's own default
_MAX_ALTERNATIVES = 20
_SEED_MODULUS = 2**63


class RequestError(Exception):
    """An error answer in vLLM's shape."""

    def __init__(self, message: str, param: str | None = None, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        name = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
        self.status = status
        self.body = msgspec.json.encode(ErrorReply(ErrorInfo(message, name, param, status.value)))


def decode_body(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The request can't be read: {error}") from error


class SamplingRequest(Struct, kw_only=True):
    """What all three generating routes take. Fields of the second part, here as below, are there to be refused."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool = False
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    response_format: Any = None
    use_beam_search: Any = None
    best_of: Any = None
    logits_processors: Any = None
    truncate_prompt_tokens: Any = None


_NEUTRAL: NeutralValues = {
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "ignore_eos": (False,),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "prompt_logprobs": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "response_format": (None, {"type": "text"}),
    "use_beam_search": (None, False),
    "best_of": (None, 1),
    "logits_processors": (None, []),
    "truncate_prompt_tokens": (None,),
}


class GenerateParameters(SamplingRequest, kw_only=True):
    logprobs: int | None = None


class GenerateRequest(Struct):
    token_ids: list[TokenId]
    sampling_params: GenerateParameters = msgspec.field(default_factory=GenerateParameters)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False


class CompletionRequest(SamplingRequest, kw_only=True):
    prompt: str | list[TokenId]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    return_token_ids: bool = False
    add_special_tokens: bool = True

    echo: Any = None
    suffix: Any = None
    prompt_embeds: Any = None


_NEUTRAL_COMPLETION: NeutralValues = {"echo": (None, False), "suffix": (None, ""), "prompt_embeds": (None,)}


class ChatRequest(SamplingRequest, kw_only=True):
    messages: list[dict[str, Any]]  # plain data, because templates read it by key
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    add_special_tokens: Any = None


_NEUTRAL_CHAT: NeutralValues = {
    "chat_template": (None,),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "add_special_tokens": (None, False),
}


class RequestReader:
    def __init__(self, tokenizer: Tokenizer, model: str, vocabulary: int, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._vocabulary = vocabulary
        self._context_length = context_length

    def read_generate(self, request: GenerateRequest) -> GenerationRequest:
        self._check_model(request.model)
        sampling = request.sampling_params
        return self._build_request(request.token_ids, sampling, sampling.max_tokens, sampling.logprobs, text=False)

    def read_completion(self, request: CompletionRequest) -> GenerationRequest:
        self._check_model(request.model)
        _refuse_unsupported(request, _NEUTRAL_COMPLETION)
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
        limit = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        return self._build_request(prompt, request, limit, request.logprobs, text=True)

    def read_chat(self, request: ChatRequest) -> GenerationRequest:
        self._check_model(request.model)
        _refuse_unsupported(request, _NEUTRAL_CHAT)
        if request.tool_choice not in (None, "auto", "none"):
            raise RequestError("The embedded engine forces no tool call.", "tool_choice")
        prompt = self._render_messages(request)
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        return self._build_request(prompt, request, limit, request.top_logprobs, text=True)

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        self._check_model(request.model)
        if request.messages:
            return self._render_messages(request)
        return self._tokenizer.encode(request.prompt or "", add_special_tokens=request.add_special_tokens is not False)

    def _check_model(self, model: str | None) -> None:
        if model and model != self._model:
            message = f"The model `{model}` does not exist; this engine has `{self._model}`."
            raise RequestError(message, "model", HTTPStatus.NOT_FOUND)

    def _render_messages(self, request: ChatRequest | TokenizeRequest) -> list[int]:
        if not request.messages:
            raise RequestError("messages must not be empty.", "messages")
        try:
            text = self._tokenizer.template.render(
                [_join_content(message) for message in request.messages],
                request.tools or None,
                request.add_generation_prompt,
                **(request.chat_template_kwargs or {}),
            )
        except TemplateError as error:
            raise RequestError(str(error), "messages") from error
        ids: list[int] = self._tokenizer.encode_turns(text).tolist()
        return ids

    def _build_request(
        self, prompt: list[int], sampling: SamplingRequest, limit: int | None, alternatives: int | None, *, text: bool
    ) -> GenerationRequest:
        if not prompt or int(np.max(prompt)) >= self._vocabulary:
            raise RequestError(
                "A prompt of token ids has at least one, and all of them are in the vocabulary.", "prompt"
            )
        _refuse_unsupported(sampling, _NEUTRAL)
        return GenerationRequest(
            prompt,
            self._resolve_max_tokens(len(prompt), limit),
            _read_sampling(sampling, alternatives),
            stop=[
                stop for stop in ([sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or ()) if stop
            ],
            stop_token_ids=sampling.stop_token_ids or (),
            show_stop=sampling.include_stop_str_in_output,
            wants_text=text,
        )

    def _resolve_max_tokens(self, prompt: int, requested: int | None) -> int:
        if requested is not None and requested < 1:
            raise RequestError(f"max_tokens must be at least 1, got {requested}.", "max_tokens")
        room = self._context_length - prompt
        if room < 1 or (requested is not None and requested > room):
            raise RequestError(
                f"This model's maximum context length is {self._context_length} tokens. However, the prompt has "
                f"{prompt}" + ("." if requested is None else f", and {requested} more were asked for."),
                "max_tokens",
            )
        return room if requested is None else requested


def _refuse_unsupported(request: SamplingRequest, unsupported: NeutralValues) -> None:
    for name, neutral in unsupported.items():
        if getattr(request, name) not in neutral:
            raise RequestError(f"The embedded engine does not support {name}.", name)


def _read_sampling(fields: SamplingRequest, alternatives: int | None) -> SamplingOptions:
    sampling = SamplingOptions(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(fields.top_k or 0, 0),  # -1 is vLLM's way to say all
        min_p=fields.min_p or 0.0,
        seed=None if fields.seed is None else fields.seed % _SEED_MODULUS,
        alternatives=alternatives or 0,
    )
    if not 0 <= sampling.temperature <= 100:
        raise RequestError(f"temperature must be between 0 and 100, got {sampling.temperature}.", "temperature")
    if not 0 < sampling.top_p <= 1:
        raise RequestError(f"top_p must be above 0 and at most 1, got {sampling.top_p}.", "top_p")
    if not 0 <= sampling.min_p <= 1:
        raise RequestError(f"min_p must be between 0 and 1, got {sampling.min_p}.", "min_p")
    if not 0 <= sampling.alternatives <= _MAX_ALTERNATIVES:
        raise RequestError(f"At most {_MAX_ALTERNATIVES} alternatives are reported for a token.", "logprobs")
    return sampling


def _join_content(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates take it: content as one text."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("The embedded engine reads text alone.", "messages")
    return message | {"content": "".join(map(str, texts))}
