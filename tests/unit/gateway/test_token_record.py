"""Chunks in, a Reply and an Exchange out: without a clock, an event loop, an engine or a store."""

from typing import Any

import numpy as np
import pytest

from polar.dialects.openai_chat import OpenAIChat
from polar.engines.base import Capabilities, Chunk, TokenPrompt
from polar.gateway.call import HarnessCall, PreparedPrompt
from polar.gateway.prompt_id_parser import PromptIdParser
from polar.gateway.token_record import TokenRecord
from polar.records.exchange import Exchange, StartedCall, VersionSpan
from polar.types import ReasoningDelta, Text, TextDelta, ToolCall, ToolCallDelta, ToolCallStart, Usage

BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
IDS = np.array([1, 2, 3], np.int32)


class Engine:
    url = "http://engine:8000"
    capabilities = Capabilities(logprobs="raw")

    def apply_sampling_defaults(self, sampling: Any) -> Any:
        return sampling


def new_record(body: bytes = BODY) -> TokenRecord:
    dialect = OpenAIChat()
    wire = dialect.split(body)
    call = HarnessCall(dialect, {}, {"user-agent": "me"}, body, wire, dialect.decode_request(wire, {}))
    started = StartedCall("x1", "s1", 4, dialect.name, wire.list_name, "m", 12.5, len(body))
    return TokenRecord(call, started)


def set_own_prompt(record: TokenRecord) -> None:
    request = record._call.request
    record.set_prompt(PreparedPrompt(TokenPrompt(IDS, b"1,2,3"), request, "", "recorded", "x0", None, None))


def build(record: TokenRecord, **changes: Any) -> Exchange:
    sampled = len(record.sampled)
    options: dict[str, Any] = {
        "engine": Engine(),
        "versions": [VersionSpan(7, 0, sampled)] if sampled else [],
        "first_token_at": 13.0,
        "ended_at": 14.0,
        "wants_logprobs": True,
    }
    return record.build_exchange("complete", sampled, None, **options | changes)


def test_the_chunks_of_a_call_become_its_reply_and_exchange() -> None:
    record = new_record()
    set_own_prompt(record)
    record.add_chunk(Chunk([ReasoningDelta("hm")], [5], [-0.5], reasoning_tokens=1))
    record.add_chunk(Chunk([TextDelta("a")], [6, 7], [-0.25, -0.125], reasoning_tokens=0))
    record.add_chunk(Chunk([ToolCallStart("", "f"), ToolCallDelta("{}")], [8], [0.0], finish_reason="stop"))
    exchange = build(record)
    assert exchange.untrainable is None
    assert (exchange.exchange_id, exchange.session_id, exchange.seq, exchange.dialect) == ("x1", "s1", 4, "openai_chat")
    assert (exchange.started_at, exchange.first_token_at, exchange.ended_at) == (12.5, 13.0, 14.0)
    assert (exchange.parent, exchange.continuation, exchange.replica) == ("x0", "recorded", "http://engine:8000")
    np.testing.assert_array_equal(exchange.prompt_ids, IDS)
    np.testing.assert_array_equal(exchange.sampled_ids, [5, 6, 7, 8])
    np.testing.assert_array_equal(exchange.logprobs, np.float32([-0.5, -0.25, -0.125, 0.0]))
    assert exchange.versions == [VersionSpan(7, 0, 4)]
    assert exchange.finish_reason == "tool_calls"
    assert exchange.usage == Usage(3, 4, reasoning=1)
    assert exchange.reply is not None
    assert exchange.reply.exchange_id == "x1"
    _, text, call = exchange.reply.parts
    assert isinstance(text, Text)
    assert isinstance(call, ToolCall)
    assert (text.text, call.name, call.arguments) == ("a", "f", "{}")
    assert "x1" in call.id  # so that an echo of the call names the exchange it came from


def test_a_record_can_be_read_at_any_time() -> None:
    record = new_record()
    assert record.prompt_usage is None
    set_own_prompt(record)
    assert record.prompt_usage == Usage(3)
    record.add_chunk(Chunk([TextDelta("a")], [5], [-0.5]))
    assert [part.text for part in record.build_reply().parts] == ["a"]
    record.add_chunk(Chunk([TextDelta("b")], [6], [-0.5]))
    assert [part.text for part in record.build_reply().parts] == ["ab"]


def test_nothing_sampled_is_no_reply() -> None:
    exchange = build(new_record(), engine=None)
    assert (exchange.reply, exchange.finish_reason, exchange.sampled_ids) == (None, None, None)
    assert (exchange.replica, exchange.untrainable) == ("", "no_reply")


def test_the_engines_own_prompt_ids_are_read_at_the_end() -> None:
    record = new_record()
    record.add_chunk(Chunk([TextDelta("a")], [5], [-0.5], prompt_json=b"[1,2,3]", finish_reason="stop"))
    record.parse_prompt_ids(PromptIdParser())
    np.testing.assert_array_equal(build(record).prompt_ids, IDS)


@pytest.mark.parametrize("text", [b"[1,", b'["a"]', b"[99999999999]"])
def test_prompt_ids_that_are_none_count_as_missing(text: bytes) -> None:
    record = new_record()
    record.add_chunk(Chunk([TextDelta("a")], [5], [-0.5], prompt_json=text, finish_reason="stop"))
    record.parse_prompt_ids(PromptIdParser())
    assert build(record).untrainable == "no_prompt_ids"


def test_tokens_that_the_engine_counts_without_listing_them() -> None:
    record = new_record()
    record.add_chunk(Chunk([TextDelta("a")], [5], [-0.5]))
    assert record.unlisted_tokens == 0
    record.add_chunk(Chunk(usage=Usage(3, 9), finish_reason="stop"))
    assert record.unlisted_tokens == 8
    assert build(record).untrainable == "token_ids_short"


SAMPLED = Chunk([TextDelta("a")], [5, 6], [-0.5, -0.5], finish_reason="stop")


@pytest.mark.parametrize(
    ("chunk", "changes", "reason"),
    [
        (SAMPLED, {}, None),
        (Chunk([TextDelta("a")], finish_reason="stop"), {}, "no_token_ids"),
        (Chunk(finish_reason="stop"), {}, "no_tokens"),
        (Chunk([TextDelta("a")], [5, -1], [-0.5, -0.5], finish_reason="stop"), {}, "token_ids_invalid"),
        (Chunk([TextDelta("a")], [2**40], [-0.5], finish_reason="stop"), {}, "token_ids_invalid"),
        (Chunk([TextDelta("a")], [5, 6], usage=Usage(3, 1), finish_reason="stop"), {}, "token_ids_long"),
        (Chunk([TextDelta("a")], [5, 6], [-0.5, -0.5], finish_reason="abort"), {}, "aborted"),
        (SAMPLED, {"versions": []}, "version_unknown"),
        (SAMPLED, {"versions": [VersionSpan(1, 0, 1)]}, "version_unknown"),
        (SAMPLED, {"versions": [VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)]}, None),
        (Chunk([TextDelta("a")], [5, 6], finish_reason="stop"), {}, "logprobs_missing"),
        (Chunk([TextDelta("a")], [5, 6], finish_reason="stop"), {"wants_logprobs": False}, None),
        (Chunk([TextDelta("a")], [5, 6], [-0.5], finish_reason="stop"), {}, "logprobs_short"),
        (Chunk([TextDelta("a")], [5, 6], [-0.5] * 3, finish_reason="stop"), {}, "logprobs_long"),
        (Chunk([TextDelta("a")], [5, 6], [-0.5, None], finish_reason="stop"), {}, "logprobs_nan"),
        (Chunk([TextDelta("a")], [5, 6], [-0.5, -1e300], finish_reason="stop"), {}, "logprobs_infinite"),
        (Chunk([TextDelta("a")], [5, 6], [-0.5, -9999.0], finish_reason="stop"), {}, "logprobs_sentinel"),
        (Chunk([TextDelta("a")], [5, 6], [-0.5, 0.5], finish_reason="stop"), {}, "logprobs_positive"),
    ],
)
def test_why_a_call_may_not_be_trained_on(chunk: Chunk, changes: dict[str, Any], reason: str | None) -> None:
    record = new_record()
    set_own_prompt(record)
    record.add_chunk(chunk)
    assert build(record, **changes).untrainable == reason


def test_log_probabilities_that_came_with_other_tokens() -> None:
    record = new_record()
    set_own_prompt(record)
    record.add_chunk(Chunk([TextDelta("a")], [5, 6], [-0.5]))
    record.add_chunk(Chunk([TextDelta("b")], [7], [-0.5, -0.5], finish_reason="stop"))
    assert build(record).untrainable == "logprobs_misaligned"


def test_masked_sampling_is_trainable_only_with_log_probabilities_from_after_masking() -> None:
    record = new_record(BODY[:-1] + b',"response_format":{"type":"json_object"}}')
    set_own_prompt(record)
    record.add_chunk(SAMPLED)
    engine = Engine()
    assert build(record, engine=engine).untrainable == "structured_output"
    engine.capabilities = Capabilities(logprobs="processed")
    assert build(record, engine=engine).untrainable is None
