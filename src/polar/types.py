"""The canonical form: what a model call says, whatever dialect it came in.

Dialects translate between a provider's wire format and these types; everything behind them (engines, capture,
rendering) knows only these. The types hold meaning, not spelling: a part says what it is and keeps text exactly as
it was sent.

Invariant: decoding never loses anything that the model would see. What a type here cannot hold is refused by the
dialect with a clear error, or is harmless and stays in the recorded wire request.

All of these are trees that live as long as a call. `gc=False` keeps the garbage collector from walking thousands of
them again and again while hundreds of calls are open.
"""

from typing import Literal, TypeAlias

from msgspec import UNSET, Raw, Struct, UnsetType, field

Role = Literal["system", "developer", "user", "assistant", "tool"]


class Text(Struct, tag="text", tag_field="part", gc=False):
    text: str


class Media(Struct, tag="media", tag_field="part", gc=False):
    """An image, audio clip, video or file: inline (`data`, base64), by address (`url`, never fetched by us), or by the
    provider's own file id. Exactly one of the three is set."""

    kind: Literal["image", "audio", "video", "file"]
    media_type: str = ""
    data: str | None = None
    url: str | None = None
    file_id: str | None = None
    name: str | None = None
    detail: str | None = None


class Reasoning(Struct, tag="reasoning", tag_field="part", gc=False):
    """The model's thinking. `seal` is the opaque string (signature, encrypted content) that travels with it."""

    text: str
    seal: str | None = None


class ToolCall(Struct, tag="call", tag_field="part", gc=False):
    """`arguments` is the text that the model wrote: JSON for a function, free text for a custom tool. Never
    re-serialised by us where the dialect carries it as text."""

    id: str
    name: str
    arguments: str
    kind: Literal["function", "custom"] = "function"
    namespace: str | None = None
    seal: str | None = None
    written: str | None = None  # the id that the model itself wrote, in markup that has one


class ToolResult(Struct, tag="result", tag_field="part", gc=False):
    call_id: str
    parts: list["Text | Media"]
    is_error: bool = False
    name: str | None = None


Part: TypeAlias = Text | Media | Reasoning | ToolCall | ToolResult


class Message(Struct, gc=False):
    """One turn. Tool results stand in messages of role `tool`, one result each; reasoning and calls in `assistant`
    ones."""

    role: Role
    parts: list[Part]
    name: str | None = None


class Tool(Struct, gc=False):
    """Something the model may call. `hosted` tools are run by the provider (web search, say): no engine has them, so
    they are recorded and not shown to the model."""

    name: str
    description: str = ""
    parameters: Raw | None = None  # JSON schema, as sent
    kind: Literal["function", "custom", "hosted"] = "function"
    namespace: str | None = None
    grammar: Raw | None = None  # a custom tool's input format, as sent
    strict: bool | None = None


class ToolChoice(Struct, gc=False):
    """`named` forces one of `names`; `auto` with names narrows the set without forcing a call."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    names: list[str] = field(default_factory=list)

    @property
    def forces_call(self) -> bool:
        return self.mode in ("required", "named")


class ResponseFormat(Struct, gc=False):
    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: Raw | None = None
    name: str | None = None
    strict: bool | None = None


class SamplingParams(Struct, omit_defaults=True, gc=False):
    """Sampling parameters as asked for; None means the engine's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    logit_bias: dict[str, float] | None = None


class Thinking(Struct, omit_defaults=True, gc=False):
    """How much the model is asked to think: None where the harness said nothing."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    visible: bool = True  # the harness wants to see it


class Request(Struct, gc=False):
    """A model call. `prompt` is set instead of `messages` for the legacy completions API (text, or token ids)."""

    model: str
    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    response_format: ResponseFormat = field(default_factory=ResponseFormat)
    thinking: Thinking = field(default_factory=Thinking)
    stream: bool = False
    stream_usage: bool = True  # the reply's stream carries usage
    logprobs: int | None = None  # the harness itself asks for log-probabilities, with so many alternatives
    prompt: str | list[int] | None = None
    echo: dict[str, Raw] = field(default_factory=dict)  # request fields that the provider repeats in its reply


FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "abort"]


class Usage(Struct, gc=False):
    """Token counts of one call. `prompt` includes `cached`; `completion` includes `reasoning`."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


class UsageTotals(Struct):
    """What calls used, by the engine's own count. `prompt` includes `cached`."""

    prompt: int = 0
    cached: int = 0
    sampled: int = 0
    uncounted: int = 0  # calls that were answered, and whose tokens the engine did not tell

    def add(self, usage: Usage, *, answered: bool) -> None:
        self.prompt += usage.prompt
        self.cached += usage.cached
        self.sampled += usage.completion
        self.uncounted += answered and not usage.prompt  # no prompt is empty

    def __add__(self, other: "UsageTotals") -> "UsageTotals":
        return UsageTotals(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.sampled + other.sampled,
            self.uncounted + other.uncounted,
        )


class TokenLogprob(Struct, gc=False):
    """One sampled token as a harness that asked for log-probabilities sees it."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list["TokenLogprob"] = field(default_factory=list)


class Reply(Struct, gc=False):
    """A finished (or cut) model turn. `parts` are in the order the model wrote them: Reasoning, Text and ToolCall."""

    exchange_id: str
    model: str
    created: int  # unix seconds
    parts: list[Part] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    stop_sequence: str | None = None
    usage: Usage = field(default_factory=Usage)
    logprobs: list[TokenLogprob] | None = None


# What a reply looks like while it is being sampled: these, in order, are the whole of it. A text or reasoning part ends
# where an event of another kind begins.


class TextDelta(Struct, gc=False):
    text: str


class ReasoningDelta(Struct, gc=False):
    text: str


class ToolCallStart(Struct, gc=False):
    """A tool call begins. `id` is the gateway's own (see `ids`), `written` the one that the model wrote, if any."""

    id: str
    name: str
    kind: Literal["function", "custom"] = "function"
    namespace: str | None = None
    written: str | None = None


class ToolCallDelta(Struct, gc=False):
    """More of the arguments of the call that began last."""

    arguments: str


ReplyEvent: TypeAlias = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta

__all__ = [
    "UNSET",
    "FinishReason",
    "Media",
    "Message",
    "Part",
    "Raw",
    "Reasoning",
    "ReasoningDelta",
    "Reply",
    "ReplyEvent",
    "Request",
    "ResponseFormat",
    "Role",
    "SamplingParams",
    "Text",
    "TextDelta",
    "Thinking",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallStart",
    "ToolChoice",
    "ToolResult",
    "UnsetType",
    "Usage",
    "UsageTotals",
]
