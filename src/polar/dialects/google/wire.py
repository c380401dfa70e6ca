"""The shapes of Google's generateContent API, for reading and for writing, and its own kind of schema.

Only fields that change what the model sees or how it samples are named; everything else is skipped by the decoders.
Google reads each field name in camelCase and in snake_case, mixed as one likes. Parts, of which a long conversation
has many, therefore name both spellings; objects that come once a request go through `camel` first. Only camelCase is
written. What a tool call or a tool result carries stays raw JSON, byte for byte.
"""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from polar.dialects import raw_fields
from polar.errors import ApiError

ABSENT = Raw(b"")
"""The value of a raw field that is not there; false, as every other raw value is true."""

Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]

# Contents. Spellings in snake_case are only read.


class Blob(Struct, omit_defaults=True):
    mimeType: str = ""
    data: str = ""
    displayName: str | None = None
    mime_type: str = ""
    display_name: str | None = None


class FileData(Struct, omit_defaults=True):
    mimeType: str = ""
    fileUri: str = ""
    displayName: str | None = None
    mime_type: str = ""
    file_uri: str = ""
    display_name: str | None = None


class PartResolution(Struct):
    level: str = ""


class FunctionCall(Struct, omit_defaults=True):
    name: str
    id: str | None = None
    args: Raw = ABSENT


class FunctionResponsePart(Struct, omit_defaults=True):
    inlineData: Blob | None = None
    fileData: FileData | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None


class FunctionResponse(Struct, omit_defaults=True):
    name: str = ""
    id: str | None = None
    response: Raw = ABSENT
    parts: list[FunctionResponsePart] | None = None


class ExecutableCode(Struct):
    code: str = ""
    language: str = ""


class CodeExecutionResult(Struct):
    output: str = ""


class Part(Struct, omit_defaults=True):
    text: str | None = None
    thought: bool | None = None
    thoughtSignature: str | None = None
    inlineData: Blob | None = None
    fileData: FileData | None = None
    mediaResolution: PartResolution | None = None
    videoMetadata: Raw = ABSENT
    functionCall: FunctionCall | None = None
    functionResponse: FunctionResponse | None = None
    executableCode: ExecutableCode | None = None
    codeExecutionResult: CodeExecutionResult | None = None
    thought_signature: str | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    media_resolution: PartResolution | None = None
    video_metadata: Raw = ABSENT
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    executable_code: ExecutableCode | None = None
    code_execution_result: CodeExecutionResult | None = None


class Content(Struct):
    parts: list[Part] | None = None
    role: str | None = None


# Tools and configuration, decoded after `camel`. Numbers may be spelled as protocol buffers' JSON allows: "5", 5.0.


class FunctionDeclaration(Struct, omit_defaults=True):
    name: str
    description: str = ""
    parameters: Raw = ABSENT  # a schema of Google's kind
    parametersJsonSchema: Raw = ABSENT


class FunctionCallingConfig(Struct, omit_defaults=True):
    mode: str = ""
    allowedFunctionNames: list[str] = []


class ToolConfig(Struct, omit_defaults=True):
    functionCallingConfig: Raw = ABSENT


class ThinkingConfig(Struct, omit_defaults=True):
    includeThoughts: bool = False
    thinkingBudget: Int32 | None = None
    thinkingLevel: str = ""


class GenerationConfig(Struct, omit_defaults=True):
    temperature: float | None = None
    topP: float | None = None
    topK: Int32 | None = None
    seed: Int32 | None = None
    maxOutputTokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    stopSequences: list[str] = []
    presencePenalty: float | None = None
    frequencyPenalty: float | None = None
    candidateCount: Int32 | None = None
    responseMimeType: str = ""
    responseSchema: Raw = ABSENT  # a schema of Google's kind
    responseJsonSchema: Raw = ABSENT
    responseFormat: Raw = ABSENT
    responseModalities: list[str] = []
    responseLogprobs: bool = False
    logprobs: Int32 | None = None
    thinkingConfig: Raw = ABSENT
    speechConfig: Raw = ABSENT
    imageConfig: Raw = ABSENT


class GenerateContentRequest(Struct, omit_defaults=True):
    """For writing; what comes in is decoded field by field."""

    contents: list[Content]
    systemInstruction: Content | None = None
    tools: list[dict[str, list[FunctionDeclaration] | dict[str, str]]] = []
    toolConfig: ToolConfig | None = None
    generationConfig: GenerationConfig | None = None


# Replies.


class LogprobsCandidate(Struct):
    token: str = ""
    logProbability: float = 0.0


class TopCandidates(Struct):
    candidates: list[LogprobsCandidate] = []


class LogprobsResult(Struct, omit_defaults=True):
    chosenCandidates: list[LogprobsCandidate] = []
    topCandidates: list[TopCandidates] = []


class Candidate(Struct, omit_defaults=True):
    content: Content | None = None
    finishReason: str | None = None
    index: int | None = None
    avgLogprobs: float | None = None
    logprobsResult: LogprobsResult | None = None


class UsageMetadata(Struct, omit_defaults=True):
    """`promptTokenCount` includes what was cached; `candidatesTokenCount` does not include thoughts."""

    promptTokenCount: int | None = None
    cachedContentTokenCount: int = 0
    candidatesTokenCount: int | None = None
    thoughtsTokenCount: int = 0
    totalTokenCount: int | None = None


class PromptFeedback(Struct, omit_defaults=True):
    blockReason: str | None = None


class GenerateContentResponse(Struct, omit_defaults=True):
    candidates: list[Candidate] = []
    promptFeedback: PromptFeedback | None = None
    usageMetadata: UsageMetadata | None = None
    modelVersion: str = ""
    createTime: str = ""
    responseId: str = ""


class Model(Struct):
    name: str
    displayName: str
    supportedGenerationMethods: tuple[str, ...] = ("generateContent", "countTokens")


class ModelList(Struct):
    models: list[Model]


class TokenCount(Struct):
    totalTokens: int


# Both spellings.

_OBJECT = msgspec.json.Decoder(dict[str, Raw])


def _to_camel_case(name: str) -> str:
    first, *rest = name.strip("_").split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in rest)


def decode_fields(raw: Raw | bytes, where: str) -> dict[str, Raw]:
    """An object's fields under their names in camelCase, without those that are null."""
    return {
        _to_camel_case(name) if "_" in name else name: value
        for name, value in raw_fields.decode(_OBJECT, raw, where).items()
        if bytes(value) != b"null"
    }


def to_camel_case(raw: Raw, where: str) -> bytes:
    """An object with its own keys (not those further in) in camelCase."""
    return raw_fields.encode(decode_fields(raw, where))


# Schemas. Google's kind is a part of OpenAPI 3.0's: types in capitals, `nullable`, whole numbers as strings.

_SCHEMA = msgspec.json.Decoder()
_SNAKE_KEYWORDS = {
    "any_of": "anyOf",
    "additional_properties": "additionalProperties",
    "max_items": "maxItems",
    "max_length": "maxLength",
    "max_properties": "maxProperties",
    "min_items": "minItems",
    "min_length": "minLength",
    "min_properties": "minProperties",
    "property_ordering": "propertyOrdering",
    "defs": "$defs",
    "ref": "$ref",
}
_COUNT_KEYWORDS = {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
_COUNT_PATTERN = re.compile(r"[0-9]{1,18}")
_NO_TYPE = "TYPE_UNSPECIFIED"


def to_json_schema(raw: Raw, where: str) -> Raw:
    """A schema of Google's kind as an ordinary JSON schema; one that already is ordinary stays as it was sent."""
    schema = raw_fields.decode(_SCHEMA, raw, where)
    try:
        ordinary = _convert_schema(schema)
        return raw if ordinary == schema else Raw(raw_fields.encode(ordinary))
    except (RecursionError, OverflowError) as error:  # the latter where a number has more than 64 bits
        raise ApiError("invalid_request", f"{where}: {error}.", param=where) from error


def _convert_schema(schema: Any) -> Any:
    """`additionalProperties`, for one, may be a truth value instead of a schema."""
    return _convert_object_schema(schema) if isinstance(schema, dict) else schema


def _convert_object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    given = {_SNAKE_KEYWORDS.get(name, name): value for name, value in schema.items()}
    ordering = given.pop("propertyOrdering", None)
    nullable = given.pop("nullable", None)
    out: dict[str, Any] = {}
    for name, value in given.items():
        match name, value:
            case "type", str():
                if value != _NO_TYPE:
                    out["type"] = value.lower()
            case "anyOf" | "oneOf" | "allOf" | "prefixItems", list():
                out[name] = [_convert_schema(item) for item in value]
            case "items" | "additionalProperties" | "not", _:
                out[name] = _convert_schema(value)
            case "properties" | "$defs" | "definitions", dict():
                out[name] = {key: _convert_schema(item) for key, item in value.items()}
            case "example", _:
                out["examples"] = [value]
            case _, str() if name in _COUNT_KEYWORDS and _COUNT_PATTERN.fullmatch(value):
                out[name] = int(value)
            case _:
                out[name] = value
    properties = out.get("properties")
    if isinstance(ordering, list) and isinstance(properties, dict):
        first = [name for name in ordering if isinstance(name, str) and name in properties]
        out["properties"] = {name: properties[name] for name in dict.fromkeys([*first, *properties])}
    if nullable is True:
        _allow_null(out)
    return out


def _allow_null(schema: dict[str, Any]) -> None:
    kind = schema.get("type")
    if isinstance(kind, str):
        schema["type"] = [kind, "null"]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"].append({"type": "null"})
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [*schema["enum"], None]
