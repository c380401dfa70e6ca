"""vLLM's HTTP API, as far as our own engines speak it (field names and order as vLLM 0.32 has them).

Requests take what they know and ignore the rest, as vLLM does. Fields of type Any are there for engines to refuse:
they would change the sampling. In replies a field that vLLM always sends is None or set; one that it leaves out where
it says nothing is UNSET.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]

# Requests


class StreamOptions(Struct):
    include_usage: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """What all three generating routes take."""

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
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_tokens: Any = None
    logit_bias: Any = None
    ignore_eos: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    prompt_logprobs: Any = None
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


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]]  # plain data, because templates read it by key
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    add_special_tokens: Any = None

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools, unless the request forbids their use."""
        return self.tools if self.tools and self.tool_choice != "none" else []


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[TokenId | str | list[TokenId]]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool = True

    echo: Any = None
    suffix: Any = None
    prompt_embeds: Any = None


class GenerateParameters(SamplingFields, kw_only=True):
    logprobs: int | None = None


class GenerateRequest(Struct):
    token_ids: list[TokenId]
    sampling_params: GenerateParameters = field(default_factory=GenerateParameters)
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class TokenizeRequest(Struct):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct):
    tokens: list[TokenId]
    model: str | None = None


class VersionRequest(Struct):
    new_version: str | int | None = None  # vLLM's name
    version: str | int | None = None


# Replies


class PromptDetails(Struct):
    cached_tokens: int
    created_cache_tokens: int | None = None
    multimodal_tokens: dict[str, int] | None = None


class CompletionDetails(Struct):
    reasoning_tokens: int


class UsageInfo(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class TextLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list["TextLogprob"] | UnsetType = UNSET


class IdLogprob(Struct):
    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list["IdLogprob"] | UnsetType = UNSET


class TextLogprobs(Struct):
    content: list[TextLogprob]


class IdLogprobs(Struct):
    content: list[IdLogprob]


class CompletionLogprobs(Struct):
    text_offset: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)


class Function(Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(Struct):
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET  # in deltas only
    function: Function = field(default_factory=Function)


class Message(Struct):
    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None  # the field's name in vLLM before 0.12; some harnesses read only this one


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class VersionSpan(Struct):
    """Output tokens `start` to `end` (exclusive) were sampled by weights labelled `version`."""

    version: str
    start: int
    end: int


class ChatChoice(Struct):
    index: int
    message: Message
    logprobs: TextLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: None = None
    weight_versions: list[VersionSpan] | UnsetType = UNSET  # not in vLLM


class ChatReply(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    object: str = "chat.completion"
    service_tier: None = None
    system_fingerprint: None = None
    prompt_logprobs: None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    weight_versions: list[VersionSpan] | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: UsageInfo | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None
    weight_versions: list[VersionSpan] | UnsetType = UNSET


class CompletionReply(Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | UnsetType = UNSET
    object: str = "text_completion"


class GenerateChoice(Struct):
    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    logprobs: IdLogprobs | None
    weight_versions: list[VersionSpan] | None  # in a stream of vLLM: with the last chunk, and of the whole output
    routed_experts: str | None = None
    sampling_mask: None = None


class GenerateReply(Struct):
    request_id: str
    model: str
    created: int
    usage: UsageInfo
    choices: list[GenerateChoice]
    prompt_logprobs: None = None
    prompt_token_ids: list[int] | None = None
    output_mode: str = "tokens"


class GenerateChunk(Struct):
    request_id: str
    choices: list[GenerateChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    output_mode: str = "tokens"


class TokenizeReply(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(Struct):
    prompt: str


class ModelCard(Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "vllm"
    parent: None = None


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


class ErrorInfo(Struct):
    message: str
    type: str
    param: str | None
    code: int


class ErrorReply(Struct):
    error: ErrorInfo
