"""Anthropic's Messages API.

Two things set this dialect apart. A user message may mix tool results with text, so that one wire message can become
several canonical ones. And the provider edits the conversation on its side (deferred tools, system messages that
expire): what such a rule hides from the model is left out here, too.

Request fields:
  used      model, messages, system, max_tokens, stream, temperature, top_p, top_k, stop_sequences, tools, tool_choice,
            thinking, output_config (effort, format), output_format
  refused   what only Anthropic's servers can do and the model would notice: mcp_servers, thread, compaction, skills in
            a container, output_config.task_budget, thinking between_tools, max_tokens 0, server-side content blocks
  harmless  everything else, with one choice to know of: `context_management` asks the server to clear old tool results
            or thinking from its own copy once the context has grown. The history is passed on as it was sent, and the
            usage reported is that of the whole history, so that the harness's own accounting stays right.
"""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec
from msgspec import UNSET, Raw

from polar.dialects import anthropic_wire as aw
from polar.dialects.anthropic_blocks import decode_tool_result, decode_turn_block, decode_visible_block, encode_part
from polar.dialects.anthropic_reply import (
    FINISH_REASONS,
    AnthropicStreamEncoder,
    build_reply,
    decode_reply_block,
    decode_usage,
    encode_error_body,
)
from polar.dialects.anthropic_tools import decode_tool_choice, decode_tools, encode_tools, require_json_object
from polar.dialects.base import EncodedError, Route
from polar.dialects.wire import decode, encode, split, unsupported_field_error
from polar.errors import HTTP_STATUS, ApiError, ApiErrorKind
from polar.records.exchange import RawRequest
from polar.types import Message, Part, Reply, Request, ResponseFormat, SamplingParams, Text, Thinking

T = TypeVar("T")

_STRING = msgspec.json.Decoder(str)
_INTEGER = msgspec.json.Decoder(int)
_MAYBE_INTEGER = msgspec.json.Decoder(int | None)
_MAYBE_FLOAT = msgspec.json.Decoder(float | None)
_MAYBE_BOOL = msgspec.json.Decoder(bool | None)
_MAYBE_STRINGS = msgspec.json.Decoder(list[str] | None)
_MAYBE_LIST = msgspec.json.Decoder(list[Raw] | None)
_SYSTEM = msgspec.json.Decoder(str | list[aw.TextBlock] | None)
_MESSAGE = msgspec.json.Decoder(aw.WireMessage)
_BLOCK_TYPES = msgspec.json.Decoder(aw.BlockTypes)
_TOOLS = msgspec.json.Decoder(list[aw.WireTool] | None)
_TOOL_CHOICE = msgspec.json.Decoder(aw.WireToolChoice | None)
_THINKING = msgspec.json.Decoder(aw.WireThinking | None)
_OUTPUT_CONFIG = msgspec.json.Decoder(aw.OutputConfig | None)
_OUTPUT_FORMAT = msgspec.json.Decoder(aw.OutputFormat | None)
_CONTAINER = msgspec.json.Decoder(str | aw.Container | None)
_REPLY = msgspec.json.Decoder(aw.WireReply)

# claude-code's first system block is an accounting line whose value changes after compaction and from agent to agent.
# It says nothing to the model; left in, it would break the prefix that turns and sub-agents share.
_BILLING_HEADER = "x-anthropic-billing-header:"

_DEFAULT_MAX_TOKENS = 32_000  # Anthropic has no default of its own; this is what claude-code asks for

_STATUS: dict[ApiErrorKind, int] = {
    **HTTP_STATUS,
    "overloaded": 529,
    "engine": 500,  # harnesses retry it as they do 529, and it does not claim that there is too much to do
}


class Anthropic:
    name = "anthropic"
    routes: tuple[Route, ...] = (
        Route("POST", re.compile(r"^/v1/messages$"), "generate"),
        Route("POST", re.compile(r"^/v1/messages/(?P<verb>count_tokens)$"), "count_tokens"),
        Route("GET", re.compile(r"^/v1/models$"), "list_models"),
        Route("GET", re.compile(r"^/v1/models/(?P<model>.+)$"), "get_model"),
    )

    def recognizes(self, path: str, headers: Mapping[str, str]) -> bool:
        """Every client of Anthropic's names the version of the API; the paths of the model list are OpenAI's, too."""
        return path.startswith("/v1/messages") or "anthropic-version" in headers

    def split(self, body: bytes) -> RawRequest:
        _require_utf8(body)
        return split(body, "messages")

    def decode_request(self, raw_request: RawRequest, params: dict[str, str]) -> Request:
        fields = raw_request.fields
        counting = params.get("verb") == "count_tokens"
        _refuse_server_features(fields, counting)
        if not raw_request.items:
            raise ApiError("invalid_request", "messages: at least one message is required.", param="messages")
        loaded_tools: set[str] = set()
        messages = _decode_system(fields) + _decode_messages(raw_request.items, loaded_tools)
        choice, parallel = decode_tool_choice(_decode_optional(fields, "tool_choice", _TOOL_CHOICE))
        thinking, response_format = _decode_output(fields)
        return Request(
            model=_decode_required(fields, "model", _STRING),
            messages=messages,
            tools=decode_tools(_decode_optional(fields, "tools", _TOOLS) or [], loaded_tools),
            tool_choice=choice,
            parallel_tool_calls=parallel,
            sampling=SamplingParams(
                temperature=_decode_optional(fields, "temperature", _MAYBE_FLOAT),
                top_p=_decode_optional(fields, "top_p", _MAYBE_FLOAT),
                top_k=_decode_optional(fields, "top_k", _MAYBE_INTEGER),
                max_tokens=_decode_max_tokens(fields, counting),
                stop=_decode_optional(fields, "stop_sequences", _MAYBE_STRINGS) or [],
            ),
            response_format=response_format,
            thinking=thinking,
            stream=_decode_optional(fields, "stream", _MAYBE_BOOL) or False,
        )

    def encode_request(self, request: Request) -> bytes:
        """Leaves out what the API has no word for: seed, penalties, min_p, logit_bias, log-probabilities, names."""
        messages = _list_messages(request)
        system: list[aw.TextBlock] = []
        if messages and messages[0].role in ("system", "developer"):
            system, messages = _encode_system(messages[0]), messages[1:]
        tools, choice = encode_tools(request)
        sampling = request.sampling
        return encode(
            aw.WireRequest(
                model=request.model,
                max_tokens=_DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens,
                messages=_encode_messages(messages),
                system=system or UNSET,
                tools=tools or UNSET,
                tool_choice=choice or UNSET,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_sequences=sampling.stop or UNSET,
                thinking=_encode_thinking(request.thinking) or UNSET,
                output_config=_encode_output(request) or UNSET,
                stream=request.stream,
            )
        )

    def encode_reply(self, request: Request, reply: Reply) -> bytes:
        return encode(build_reply(request, reply))

    def decode_reply(self, body: bytes) -> Reply:
        try:
            _require_utf8(body)
            reply = decode(_REPLY, body, "reply")
        except ApiError as error:
            raise ApiError("engine", error.message) from error
        return Reply(
            exchange_id=reply.id.removeprefix("msg_"),
            model=reply.model,
            created=0,
            parts=[*map(decode_reply_block, reply.content)],
            finish_reason=FINISH_REASONS.get(reply.stop_reason, "stop"),
            stop_sequence=reply.stop_sequence,
            usage=decode_usage(reply.usage),
        )

    def create_stream_encoder(self, request: Request, exchange_id: str, created: int) -> AnthropicStreamEncoder:  # noqa: ARG002
        return AnthropicStreamEncoder(request, exchange_id)

    def encode_count(self, tokens: int) -> bytes:
        return encode(aw.TokenCount(tokens))

    def encode_models(self, models: list[str], model: str | None) -> bytes:
        if model is not None:
            return encode(aw.ModelInfo(model, model))
        listed = [aw.ModelInfo(name, name) for name in models]
        return encode(aw.ModelList(listed, models[0] if models else None, models[-1] if models else None))

    def encode_error(self, error: ApiError) -> EncodedError:
        headers = {"content-type": "application/json"}
        if error.retry_after is not None:
            headers["retry-after"] = str(max(0, math.ceil(error.retry_after)))
        return EncodedError(_STATUS[error.kind], encode_error_body(error), headers)


# Reading a request.


def _require_utf8(body: bytes) -> None:
    """Raw JSON is cut out unread, so that bytes which are no text would only be found where it is used."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise ApiError("invalid_request", f"The body is not UTF-8: {error}.") from error


def _decode_optional(fields: dict[str, Raw], name: str, decoder: "msgspec.json.Decoder[T | None]") -> T | None:
    raw = fields.get(name)
    return None if raw is None else decode(decoder, raw, name)


def _decode_required(fields: dict[str, Raw], name: str, decoder: "msgspec.json.Decoder[T]") -> T:
    if name not in fields:
        raise ApiError("invalid_request", f"{name}: Field required.", param=name)
    return decode(decoder, fields[name], name)


def _is_present(raw: Raw | msgspec.UnsetType | None) -> bool:
    return raw is not None and raw is not UNSET and bytes(raw) != b"null"


def _refuse_server_features(fields: dict[str, Raw], counting: bool) -> None:
    if _decode_optional(fields, "mcp_servers", _MAYBE_LIST):
        raise unsupported_field_error(
            "mcp_servers", "nothing here calls them; let the harness connect and offer their tools"
        )
    if _is_present(fields.get("thread")):
        raise unsupported_field_error("thread", "no conversation is held here; send all of its messages")
    if _is_present(fields.get("compaction")) and not counting:  # a count ignores it, as documented
        raise unsupported_field_error("compaction", "let the harness ask for a summary in a message")
    container = _decode_optional(fields, "container", _CONTAINER)
    if isinstance(container, aw.Container) and container.skills:
        raise unsupported_field_error("container.skills", "skills run in Anthropic's containers")


def _decode_max_tokens(fields: dict[str, Raw], counting: bool) -> int | None:
    if counting:
        return _decode_optional(fields, "max_tokens", _MAYBE_INTEGER)
    tokens = _decode_required(fields, "max_tokens", _INTEGER)
    if tokens == 0:
        raise unsupported_field_error("max_tokens", "0 asks to fill a cache and sample nothing")
    if tokens < 0:
        raise ApiError("invalid_request", "max_tokens: must be at least 1.", param="max_tokens")
    return tokens


def _decode_system(fields: dict[str, Raw]) -> list[Message]:
    system = _decode_optional(fields, "system", _SYSTEM)
    texts = [system] if isinstance(system, str) else [block.text for block in system or []]
    parts: list[Part] = [Text(text) for text in texts if text and not text.startswith(_BILLING_HEADER)]
    return [Message("system", parts)] if parts else []


def _decode_messages(items: list[Raw], loaded_tools: set[str]) -> list[Message]:
    """The conversation; the names of tools that a tool_reference brings in are added to `loaded`."""
    wire_messages = [_decode_message(item, f"messages[{index}]") for index, item in enumerate(items)]
    last_user = max((index for index, message in enumerate(wire_messages) if message.role == "user"), default=-1)
    messages: list[Message] = []
    for index, message in enumerate(wire_messages):
        where = f"messages[{index}].content"
        if message.role == "user":
            messages += _decode_user(message, where, loaded_tools)
        elif message.role == "assistant":
            messages.append(Message("assistant", _decode_assistant(message, where)))
        elif message.output_config is not None and message.output_config.effort is not None:
            raise unsupported_field_error(
                f"messages[{index}].output_config", "effort can only be set for the whole request"
            )
        elif message.clear_at != "next_user_message" or index > last_user:
            messages.append(Message("system", _decode_text_only(message, where)))
    return messages


def _decode_message(item: Raw, where: str) -> aw.WireMessage:
    try:
        return decode(_MESSAGE, item, where)
    except ApiError:
        with suppress(msgspec.DecodeError, RecursionError):  # then the first error says more
            for index, block in enumerate(_BLOCK_TYPES.decode(item).content):
                if block.type not in aw.BLOCK_TYPES:
                    raise _unknown_block_error(block.type, f"{where}.content[{index}]") from None
        raise


def _unknown_block_error(block_type: str, where: str) -> ApiError:
    return ApiError(
        "unsupported",
        f"{where}: blocks of type {block_type!r} are not supported; what Anthropic's servers write, only they can show "
        "to a model.",
        param=where,
    )


def _misplaced_block_error(block: aw.Block, role: str, where: str) -> ApiError:
    block_type = block.__struct_config__.tag
    message = f"{where}: a block of type {block_type!r} can't stand in a message of role {role!r}."
    return ApiError("invalid_request", message, param=where)


def _content_blocks(message: aw.WireMessage) -> list[aw.Block]:
    if isinstance(message.content, str):
        return [aw.TextBlock(message.content)] if message.content else []
    return message.content


def _decode_text_only(message: aw.WireMessage, where: str) -> list[Part]:
    parts: list[Part] = []
    for index, block in enumerate(_content_blocks(message)):
        if not isinstance(block, aw.TextBlock):
            raise _misplaced_block_error(block, message.role, f"{where}[{index}]")
        parts.append(Text(block.text))
    return parts


def _decode_assistant(message: aw.WireMessage, where: str) -> list[Part]:
    parts: list[Part] = []
    for index, block in enumerate(_content_blocks(message)):
        if isinstance(block, aw.ToolResultBlock):
            raise _misplaced_block_error(block, message.role, f"{where}[{index}]")
        if isinstance(block, aw.TurnBlock):
            parts.append(decode_turn_block(block))
        else:
            parts += decode_visible_block(block)
    return parts


def _decode_user(message: aw.WireMessage, where: str, loaded_tools: set[str]) -> list[Message]:
    """Each tool result becomes a message of its own; what stands between them stays together."""
    blocks = _content_blocks(message)
    if not blocks:
        return [Message("user", [])]
    messages: list[Message] = []
    for index, block in enumerate(blocks):
        if isinstance(block, aw.ToolResultBlock):
            messages.append(Message("tool", [decode_tool_result(block, loaded_tools)]))
        elif isinstance(block, aw.TurnBlock):
            raise _misplaced_block_error(block, message.role, f"{where}[{index}]")
        elif messages and messages[-1].role == "user":
            messages[-1].parts += decode_visible_block(block)
        else:
            messages.append(Message("user", [*decode_visible_block(block)]))
    return messages


def _decode_output(fields: dict[str, Raw]) -> tuple[Thinking, ResponseFormat]:
    config = _decode_optional(fields, "output_config", _OUTPUT_CONFIG) or aw.OutputConfig()
    if _is_present(config.task_budget):
        raise unsupported_field_error("output_config.task_budget", "only Anthropic's models are told of such a budget")
    thinking = _decode_thinking(fields, config.effort)
    wanted = config.format or _decode_optional(fields, "output_format", _OUTPUT_FORMAT)
    if wanted is None:
        return thinking, ResponseFormat()
    return thinking, ResponseFormat("json_schema", require_json_object(wanted.schema, "output_config.format.schema"))


def _decode_thinking(fields: dict[str, Raw], effort: str | None) -> Thinking:
    """`display` changes nothing: at Anthropic, thinking that a reply omits still reaches the model in the next turn,
    inside the signature. Here only the text that the harness sends back can do that, so it is always shown."""
    thinking = _decode_optional(fields, "thinking", _THINKING)
    if thinking is None:
        return Thinking(effort=effort)
    if thinking.type == "between_tools":
        raise unsupported_field_error("thinking.type", "no engine can limit thinking to the time between tool calls")
    if thinking.type == "disabled":
        return Thinking(enabled=False, effort=effort, visible=False)
    return Thinking(enabled=True, effort=effort, budget=thinking.budget_tokens)


# Writing a request.


def _list_messages(request: Request) -> list[Message]:
    if request.prompt is None:
        return request.messages
    if isinstance(request.prompt, str):
        return [Message("user", [Text(request.prompt)])]
    raise unsupported_field_error("prompt", "Anthropic takes no token ids")


def _encode_system(message: Message) -> list[aw.TextBlock]:
    blocks = []
    for part in message.parts:
        if not isinstance(part, Text):
            raise unsupported_field_error("system", "Anthropic's system prompt holds only text")
        blocks.append(aw.TextBlock(part.text))
    return blocks


def _encode_messages(messages: list[Message]) -> list[aw.WireMessage]:
    """Tool results that follow each other, and the user's words after them, share one message, as the API wants."""
    out: list[aw.WireMessage] = []
    results: list[aw.Block] | None = None  # the content of the last message, while it holds only results
    for message in messages:
        blocks = [*map(encode_part, message.parts)]
        if message.role == "tool":
            if results is None:
                results = []
                out.append(aw.WireMessage("user", results))
            results += blocks
        elif message.role == "user" and results is not None and blocks:
            results += blocks
            results = None
        else:
            results = None
            out.append(aw.WireMessage("system" if message.role == "developer" else message.role, blocks))
    return out


def _encode_thinking(thinking: Thinking) -> aw.WireThinking | None:
    if thinking.enabled is None and thinking.budget is None:
        return None
    if thinking.enabled is False:
        return aw.WireThinking("disabled")
    display = None if thinking.visible else "omitted"
    return aw.WireThinking("adaptive" if thinking.budget is None else "enabled", thinking.budget, display)


def _encode_output(request: Request) -> aw.OutputConfig | None:
    effort = "low" if request.thinking.effort == "minimal" else request.thinking.effort
    wanted = request.response_format
    if wanted.kind == "text":
        return aw.OutputConfig(effort) if effort else None
    return aw.OutputConfig(effort, aw.OutputFormat(wanted.schema or Raw(b'{"type":"object"}')))
