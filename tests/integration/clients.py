"""The official clients, each behind the same small face.

A `Client` keeps the provider's own shapes: `user`, `results` and `Answer.echo` are lists of items of its API, which a
test puts together into a history. So what goes over the wire is what the provider's own client writes.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import anthropic
import openai
from google import genai
from google.genai import types as gt

from polar.types import FinishReason

MODEL = "some-model"  # a name that no engine knows
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PICTURE_URL = "https://pictures.example/cat.png"


class Call(NamedTuple):
    id: str
    name: str
    arguments: Any  # parsed; of a custom tool the text
    namespace: str | None = None


@dataclass
class Answer:
    """A reply as the client understood it."""

    text: str
    reasoning: str
    calls: list[Call]
    finish: FinishReason
    issued: list[str]  # every id in it
    echo: list[Any]  # the turn as this client sends it back
    prompt: int
    completion: int
    cached: int
    native: Any  # the client's own object; of a stream, as it put it together


class ToolSpec(NamedTuple):
    name: str
    schema: dict[str, Any]


def tool(name: str, *parameters: str) -> ToolSpec:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    return ToolSpec(name, {"type": "object", "properties": properties, "required": list(parameters)})


@dataclass
class Wish:
    """What a request asks for besides its history."""

    system: str | None = None
    tools: Sequence[ToolSpec] = ()
    force: str | None = None  # a tool's name, or "" for any
    schema: dict[str, Any] | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # in the client's own words


class Picture(NamedTuple):
    """In base64, or by address."""

    data: str | None = None
    url: str | None = None


Content = str | Picture


class Output(NamedTuple):
    """A tool's result."""

    call: Call
    content: Sequence[Content]
    is_error: bool = False


class Client(Protocol):
    dialect: str
    error: ClassVar[type[Exception]]  # what all of the client's errors have in common
    errors: ClassVar[dict[int, type[Exception]]]  # what the client raises, by status
    overloaded: ClassVar[int]  # the provider's own status for "try again later"
    broken: ClassVar[int]  # and for a server that failed

    async def ask(self, history: Sequence[Any], *, stream: bool = False, wish: Wish | None = None) -> Answer: ...

    def user(self, *content: Content) -> list[Any]: ...

    def results(self, *outputs: Output) -> list[Any]: ...

    async def models(self) -> list[str]: ...

    async def model(self, name: str) -> str: ...

    async def close(self) -> None: ...


def status_of(error: Exception) -> int:
    """The HTTP status that a client's exception tells."""
    status: int = getattr(error, "status_code", None) or error.code  # type: ignore[attr-defined]
    return status


def _without_empty(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != []}


# OpenAI


class _OpenAI:
    error: ClassVar[type[Exception]] = openai.APIError
    errors: ClassVar[dict[int, type[Exception]]] = {
        400: openai.BadRequestError,
        401: openai.AuthenticationError,
        404: openai.NotFoundError,
        413: openai.APIStatusError,
        429: openai.RateLimitError,
        500: openai.InternalServerError,
        502: openai.InternalServerError,
        503: openai.InternalServerError,
    }
    overloaded: ClassVar[int] = 503
    broken: ClassVar[int] = 502

    def __init__(self, url: str, key: str) -> None:
        http = openai.DefaultAsyncHttpxClient(verify=False)  # there is no TLS here, and certificates take long to load
        self.client = openai.AsyncOpenAI(api_key=key, base_url=url + "/v1", max_retries=0, http_client=http)

    async def models(self) -> list[str]:
        return [model.id async for model in self.client.models.list()]

    async def model(self, name: str) -> str:
        return (await self.client.models.retrieve(name)).id

    async def close(self) -> None:
        await self.client.close()


class Chat(_OpenAI):
    dialect = "openai_chat"

    async def ask(self, history: Sequence[Any], *, stream: bool = False, wish: Wish | None = None) -> Answer:
        wish = wish or Wish()
        body = _without_empty(
            model=MODEL,
            messages=[*([{"role": "system", "content": wish.system}] if wish.system else []), *history],
            tools=[_function(spec) for spec in wish.tools],
            max_completion_tokens=wish.max_tokens,
            stop=wish.stop,
        )
        if wish.force is not None:
            named = {"type": "function", "function": {"name": wish.force}}
            body["tool_choice"] = named if wish.force else "required"
        if wish.schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "form", "schema": wish.schema}}
        body |= wish.extra
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            return self._answer(await _chat_completion(await self.client.chat.completions.create(**body)))
        return self._answer(await self.client.chat.completions.create(**body))

    def user(self, *content: Content) -> list[Any]:
        return [{"role": "user", "content": [_chat_part(part) for part in content]}]

    def results(self, *outputs: Output) -> list[Any]:
        """There is no word for an error here: it is in the text."""
        return [
            {"role": "tool", "tool_call_id": out.call.id, "content": [_chat_part(part) for part in out.content]}
            for out in outputs
        ]

    def _answer(self, completion: Any) -> Answer:
        (choice,) = completion.choices
        message = choice.message
        usage = completion.usage or openai.types.CompletionUsage(prompt_tokens=0, completion_tokens=0, total_tokens=0)
        calls = [
            Call(call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()
        ]
        return Answer(
            text=message.content or "",
            reasoning=getattr(message, "reasoning_content", None) or "",
            calls=calls,
            finish=choice.finish_reason,
            issued=[completion.id, *(call.id for call in calls)],
            echo=[message.model_dump(exclude_none=True)],
            prompt=usage.prompt_tokens,
            completion=usage.completion_tokens,
            cached=(usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0,
            native=completion,
        )


def _function(spec: ToolSpec) -> dict[str, Any]:
    return {"type": "function", "function": {"name": spec.name, "description": "A tool.", "parameters": spec.schema}}


def _chat_part(part: Content) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": part.url or f"data:image/png;base64,{part.data}"}}


async def _chat_completion(stream: Any) -> Any:
    """A stream of chunks, put together. (The client's own helper for this takes strict functions only.)"""
    message: dict[str, Any] = {"role": None, "content": ""}
    calls: list[dict[str, Any]] = []
    finish = usage = None
    last: Any = None
    async for chunk in stream:
        last = chunk
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            finish = choice.finish_reason or finish
            message["role"] = delta.role or message["role"]
            message["content"] += delta.content or ""
            if thinking := getattr(delta, "reasoning_content", None):
                message["reasoning_content"] = message.get("reasoning_content", "") + thinking
            for piece in delta.tool_calls or ():
                if piece.index == len(calls):
                    calls.append({"id": piece.id, "type": piece.type, "function": {"name": "", "arguments": ""}})
                function = calls[piece.index]["function"]
                function["name"] += piece.function.name or ""
                function["arguments"] += piece.function.arguments or ""
    if calls:
        message["tool_calls"] = calls
    return openai.types.chat.ChatCompletion.model_validate(
        {
            "id": last.id,
            "object": "chat.completion",
            "created": last.created,
            "model": last.model,
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": usage,
        }
    )


class Responses(_OpenAI):
    dialect = "openai_responses"

    async def ask(self, history: Sequence[Any], *, stream: bool = False, wish: Wish | None = None) -> Answer:
        body = self.body(history, wish or Wish())
        if stream:
            async with self.client.responses.stream(**body) as events:
                async for event in events:
                    if event.type in ("response.completed", "response.incomplete"):
                        return self._answer(event.response)
                    if event.type == "response.failed":  # the client leaves this one to its user
                        raise openai.APIError(str(event.response.error), events._response.request, body=None)
            raise AssertionError("the stream did not end")
        return self._answer(await self.client.responses.create(**body))

    def body(self, history: Sequence[Any], wish: Wish) -> dict[str, Any]:
        body = _without_empty(
            model=MODEL,
            input=list(history),
            instructions=wish.system,
            tools=[
                {
                    "type": "function",
                    "name": spec.name,
                    "description": "A tool.",
                    "parameters": spec.schema,
                    "strict": False,
                }
                for spec in wish.tools
            ],
            max_output_tokens=wish.max_tokens,
        )
        if wish.stop is not None:  # not of OpenAI's API, but of those who serve open models with it
            body["extra_body"] = {"stop": wish.stop}
        if wish.force is not None:
            body["tool_choice"] = {"type": "function", "name": wish.force} if wish.force else "required"
        if wish.schema is not None:
            body["text"] = {"format": {"type": "json_schema", "name": "form", "schema": wish.schema}}
        return body | wish.extra

    def user(self, *content: Content) -> list[Any]:
        return [{"role": "user", "content": [_responses_part(part) for part in content]}]

    def results(self, *outputs: Output) -> list[Any]:
        return [
            {
                "type": "function_call_output",
                "call_id": out.call.id,
                "output": [_responses_part(part) for part in out.content],
            }
            for out in outputs
        ]

    def _answer(self, response: Any) -> Answer:
        calls: list[Call] = []
        issued = [response.id]
        reasoning = ""
        for item in response.output:
            issued.append(item.id)
            if item.type == "reasoning":
                reasoning += "".join(part.text for part in item.summary)
            elif item.type == "function_call":
                calls.append(Call(item.call_id, item.name, json.loads(item.arguments), item.namespace))
            elif item.type == "custom_tool_call":
                calls.append(Call(item.call_id, item.name, item.input, item.namespace))
        cut = response.incomplete_details
        finish: FinishReason = "tool_calls" if calls else "stop"
        return Answer(
            text=response.output_text,
            reasoning=reasoning,
            calls=calls,
            finish="length" if cut and cut.reason == "max_output_tokens" else finish,
            issued=[*issued, *(call.id for call in calls)],
            echo=[item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output],
            prompt=response.usage.input_tokens,
            completion=response.usage.output_tokens,
            cached=response.usage.input_tokens_details.cached_tokens,
            native=response,
        )


def _responses_part(part: Content) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    return {"type": "input_image", "image_url": part.url or f"data:image/png;base64,{part.data}"}


# Anthropic


class Messages:
    dialect = "anthropic"
    error: ClassVar[type[Exception]] = anthropic.APIError
    errors: ClassVar[dict[int, type[Exception]]] = {
        400: anthropic.BadRequestError,
        401: anthropic.AuthenticationError,
        404: anthropic.NotFoundError,
        413: anthropic.APIStatusError,
        429: anthropic.RateLimitError,
        500: anthropic.InternalServerError,
        529: anthropic.InternalServerError,
    }
    overloaded: ClassVar[int] = 529
    broken: ClassVar[int] = 500

    def __init__(self, url: str, key: str) -> None:
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        self.client = anthropic.AsyncAnthropic(api_key=key, base_url=url, max_retries=0, http_client=http)

    async def ask(self, history: Sequence[Any], *, stream: bool = False, wish: Wish | None = None) -> Answer:
        body = self.body(history, wish or Wish())
        if stream:
            async with self.client.messages.stream(**body) as events:
                return self.answer(await events.get_final_message())
        return self.answer(await self.client.messages.create(**body))

    def body(self, history: Sequence[Any], wish: Wish) -> dict[str, Any]:
        body = _without_empty(
            model=MODEL,
            max_tokens=wish.max_tokens or 1000,
            messages=list(history),
            system=wish.system,
            stop_sequences=wish.stop,
            tools=[{"name": spec.name, "description": "A tool.", "input_schema": spec.schema} for spec in wish.tools],
        )
        if wish.force is not None:
            body["tool_choice"] = {"type": "tool", "name": wish.force} if wish.force else {"type": "any"}
        if wish.schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": wish.schema}}
        return body | wish.extra

    def user(self, *content: Content) -> list[Any]:
        return [{"role": "user", "content": [_block(part) for part in content]}]

    def results(self, *outputs: Output) -> list[Any]:
        blocks = [
            {
                "type": "tool_result",
                "tool_use_id": out.call.id,
                "content": [_block(part) for part in out.content],
                "is_error": out.is_error,
            }
            for out in outputs
        ]
        return [{"role": "user", "content": blocks}]

    async def models(self) -> list[str]:
        return [model.id async for model in self.client.models.list()]

    async def model(self, name: str) -> str:
        return (await self.client.models.retrieve(name)).id

    async def close(self) -> None:
        await self.client.close()

    @staticmethod
    def answer(message: Any) -> Answer:
        """Of `messages`, and of `beta.messages`."""
        text = reasoning = ""
        calls: list[Call] = []
        for block in message.content:
            if block.type == "text":
                text += block.text
            elif block.type == "thinking":
                reasoning += block.thinking
            elif block.type == "tool_use":
                calls.append(Call(block.id, block.name, block.input))
        finish: FinishReason = _ANTHROPIC_FINISH[message.stop_reason]
        cached = message.usage.cache_read_input_tokens or 0
        return Answer(
            text=text,
            reasoning=reasoning,
            calls=calls,
            finish=finish,
            issued=[message.id, *(call.id for call in calls)],
            echo=[{"role": "assistant", "content": [_echoed(block) for block in message.content]}],
            prompt=message.usage.input_tokens + cached,  # what was cached is counted apart
            completion=message.usage.output_tokens,
            cached=cached,
            native=message,
        )


_ANTHROPIC_FINISH: dict[str, FinishReason] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
}


def _echoed(block: Any) -> dict[str, Any]:
    fields: dict[str, Any] = block.model_dump(exclude_none=True)
    fields.pop("parsed_output", None)
    return fields


def _block(part: Content) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    inline = {"type": "base64", "media_type": "image/png", "data": part.data}
    return {"type": "image", "source": {"type": "url", "url": part.url} if part.url else inline}


# Google


class Gemini:
    dialect = "google"
    error: ClassVar[type[Exception]] = genai.errors.APIError
    errors: ClassVar[dict[int, type[Exception]]] = {
        **dict.fromkeys((400, 401, 404, 413, 429), genai.errors.ClientError),
        **dict.fromkeys((500, 502, 503), genai.errors.ServerError),
    }
    overloaded: ClassVar[int] = 503
    broken: ClassVar[int] = 502

    def __init__(self, url: str, key: str) -> None:
        options = gt.HttpOptions(base_url=url, client_args={"verify": False}, async_client_args={"ssl": False})
        self.client = genai.Client(api_key=key, http_options=options)

    async def ask(self, history: Sequence[Any], *, stream: bool = False, wish: Wish | None = None) -> Answer:
        wish = wish or Wish()
        config = self.config(wish)
        if stream:
            chunks = await self.client.aio.models.generate_content_stream(
                model=MODEL, contents=list(history), config=config
            )
            return self._answer([chunk async for chunk in chunks])
        return self._answer(
            [await self.client.aio.models.generate_content(model=MODEL, contents=list(history), config=config)]
        )

    def config(self, wish: Wish) -> gt.GenerateContentConfig:
        declared = [
            gt.FunctionDeclaration(name=spec.name, description="A tool.", parameters_json_schema=spec.schema)
            for spec in wish.tools
        ]
        options = _without_empty(
            system_instruction=wish.system,
            tools=[gt.Tool(function_declarations=declared)] if declared else None,
            max_output_tokens=wish.max_tokens,
            stop_sequences=wish.stop,
            thinking_config=gt.ThinkingConfig(include_thoughts=True),
        )
        if wish.force is not None:
            calling = gt.FunctionCallingConfig(
                mode=gt.FunctionCallingConfigMode.ANY, allowed_function_names=[wish.force] if wish.force else None
            )
            options["tool_config"] = gt.ToolConfig(function_calling_config=calling)
        if wish.schema is not None:
            options |= {"response_mime_type": "application/json", "response_json_schema": wish.schema}
        return gt.GenerateContentConfig(**options | wish.extra)

    def user(self, *content: Content) -> list[Any]:
        return [gt.Content(role="user", parts=[_google_part(part) for part in content])]

    def results(self, *outputs: Output) -> list[Any]:
        parts = []
        for out in outputs:
            text = "".join(part for part in out.content if isinstance(part, str))
            media = [
                gt.FunctionResponsePart(
                    inline_data=gt.FunctionResponseBlob(mime_type="image/png", data=base64.b64decode(part.data or ""))
                )
                for part in out.content
                if isinstance(part, Picture)
            ]
            response = gt.FunctionResponse(
                id=out.call.id,
                name=out.call.name,
                response={"error" if out.is_error else "output": text},
                parts=media or None,
            )
            parts.append(gt.Part(function_response=response))
        return [gt.Content(role="user", parts=parts)]

    async def models(self) -> list[str]:
        return [str(model.name).removeprefix("models/") async for model in await self.client.aio.models.list()]

    async def model(self, name: str) -> str:
        return str((await self.client.aio.models.get(model=name)).name).removeprefix("models/")

    async def close(self) -> None:
        await self.client.aio.aclose()
        self.client.close()

    def _answer(self, chunks: list[Any]) -> Answer:
        """Of a stream, or of its one and only piece. Google's client keeps the contents of a stream apart when it sends
        them back, so we do."""
        text = reasoning = ""
        calls: list[Call] = []
        echo = [chunk.candidates[0].content for chunk in chunks]
        for part in (part for content in echo for part in content.parts):
            if part.function_call is not None:
                calls.append(Call(part.function_call.id, part.function_call.name, part.function_call.args))
            elif part.thought:
                reasoning += part.text
            else:
                text += part.text
        last = chunks[-1]
        usage = last.usage_metadata
        finish: FinishReason = "tool_calls" if calls else "stop"
        return Answer(
            text=text,
            reasoning=reasoning,
            calls=calls,
            finish="length" if last.candidates[0].finish_reason == "MAX_TOKENS" else finish,
            issued=[last.response_id, *(call.id for call in calls)],
            echo=echo,
            prompt=usage.prompt_token_count,
            completion=(usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0),
            cached=usage.cached_content_token_count or 0,
            native=last,
        )


def _google_part(part: Content) -> gt.Part:
    if isinstance(part, str):
        return gt.Part(text=part)
    if part.url:
        return gt.Part(file_data=gt.FileData(file_uri=part.url, mime_type="image/png"))
    return gt.Part(inline_data=gt.Blob(mime_type="image/png", data=base64.b64decode(part.data or "")))


GOOGLE_WARNS = "ignore:Inheritance class AiohttpClientSession:DeprecationWarning"  # Google's client, about itself
ClientKind: TypeAlias = type[Chat] | type[Responses] | type[Messages] | type[Gemini]
CLIENTS: tuple[ClientKind, ...] = (Chat, Responses, Messages, Gemini)
