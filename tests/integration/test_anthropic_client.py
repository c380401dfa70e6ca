"""Anthropic's own client, where its API differs from the others: see `test_clients` for what all can do."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from polar.engines.scripted import Play, PlaySet, ScriptedTurn
from polar.engines.scripted.play import ScriptedCall as PlayedCall
from tests.integration.clients import MODEL, PNG, Messages, Wish, tool
from tests.integration.listening import Gateway, exact, gateway

WORDS = "One two three, four; fünf — 六 🙂 eight STOP nine ten."
CALL = PlayedCall("shell", {"command": "ls", "timeout": 1.0})

PLAYS = PlaySet(
    Play([ScriptedTurn(text=WORDS)]),
    {
        "thinks": Play([ScriptedTurn(reasoning="Hm.", text="Yes.")]),
        "calls": Play([ScriptedTurn(reasoning="Hm.", text="I look.", calls=[CALL]), ScriptedTurn(text="Done.")]),
        "garbled": Play(
            [ScriptedTurn(raw='So:<tool_call>{"name": "shell", "arguments": {"command": oops}}</tool_call>')]
        ),
        "429": Play([ScriptedTurn(fail=429)]),
        "503": Play([ScriptedTurn(fail=503)]),
    },
)
SHELL = tool("shell", "command")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path, PLAYS, max_model_len=4096) as started:
        yield started


@pytest.fixture
async def client(running: Gateway) -> AsyncIterator[Messages]:
    made = Messages(running.url, running.key)
    yield made
    await made.close()


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# Requests


async def test_system_messages_stay_where_they_stand(running: Gateway, client: Messages) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
        {"type": "text", "text": "Rule one.", "cache_control": {"type": "ephemeral"}},
    ]
    history = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "system", "content": "Rule two."},
        {"role": "user", "content": [{"type": "text", "text": "Go.", "cache_control": {"type": "ephemeral"}}]},
    ]
    (exchange,) = await running.recorded(await client.ask(history, wish=Wish(extra={"system": system})))
    assert running.prompt_text(exchange) == (
        "<|im_start|>system\nRule one.<|im_end|>\n"
        "<|im_start|>user\nHello.<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>system\nRule two.<|im_end|>\n"
        "<|im_start|>user\nGo.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_results_beside_text_become_messages_of_their_own(running: Gateway, client: Messages) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "shell", "input": {"command": "ls"}}
    mixed = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt"},
        {"type": "text", "text": "And now?"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    ]
    history = [
        *client.user("Go."),
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": mixed},
    ]
    await running.recorded(await client.ask(history, wish=Wish(tools=[SHELL])))
    tool_message, user_message = running.engine.heard[-1]["messages"][-2:]
    assert (tool_message["role"], tool_message["content"]) == ("tool", "a.txt")
    assert user_message["role"] == "user"
    assert [part["type"] for part in user_message["content"]] == ["text", "image_url"]


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, None])
async def test_thinking(running: Gateway, client: Messages, stream: bool, thinking: dict[str, Any] | None) -> None:
    extra = {} if thinking is None else {"thinking": thinking, "max_tokens": 2000}
    answer = await client.ask(client.user("PLAY:thinks"), stream=stream, wish=Wish(extra=extra))
    assert (answer.reasoning, answer.text) == ("Hm.", "Yes.")
    (exchange,) = await running.recorded(answer)
    assert exchange.exchange_id in answer.native.content[0].signature
    switched = running.engine.heard[-1].get("chat_template_kwargs", {}).get("enable_thinking")
    assert switched is (None if thinking is None else True)


async def test_thinking_switched_off(running: Gateway, client: Messages, stream: bool) -> None:
    wish = Wish(extra={"thinking": {"type": "disabled"}})
    answer = await client.ask(client.user("PLAY:thinks"), stream=stream, wish=wish)
    assert (answer.reasoning, answer.text) == ("", "Yes.")
    (exchange,) = await running.recorded(answer)
    assert running.prompt_text(exchange).endswith("<think></think>")


async def test_counting_samples_nothing(running: Gateway, client: Messages) -> None:
    wish = Wish(system="Be brief.", tools=[SHELL])
    body = client.body(client.user("How many?"), wish)
    del body["max_tokens"]
    count = await client.client.messages.count_tokens(**body)
    beta = await client.client.beta.messages.count_tokens(**body)
    assert await running.exchanges() == []
    answer = await client.ask(client.user("How many?"), wish=wish)
    await running.recorded(answer)
    assert count.input_tokens == beta.input_tokens == answer.prompt


# Replies


async def test_the_stop_sequence_is_told(running: Gateway, client: Messages, stream: bool) -> None:
    answer = await client.ask(client.user("Go."), stream=stream, wish=Wish(stop=["never", "STOP"]))
    assert (answer.native.stop_reason, answer.native.stop_sequence) == ("stop_sequence", "STOP")
    await running.recorded(answer)


async def test_input_tokens_leave_out_what_was_cached(running: Gateway, client: Messages, stream: bool) -> None:
    history = client.user("word " * 100)
    await client.ask(history, stream=stream)
    usage = (await client.ask(history, stream=stream)).native.usage
    _, exchange = await running.exchanges()
    prompt, sampled = exact(exchange)
    assert usage.cache_read_input_tokens > 0
    assert usage.input_tokens == prompt - usage.cache_read_input_tokens
    assert usage.output_tokens == sampled


async def test_the_prompts_length_is_told_at_the_start_of_a_stream(running: Gateway, client: Messages) -> None:
    """Harnesses take it from there for their context accounting."""
    async with client.client.messages.stream(**client.body(client.user("Go."), Wish())) as events:
        starts = [event.message.usage.input_tokens async for event in events if event.type == "message_start"]
    (exchange,) = await running.exchanges()
    assert starts == [exact(exchange)[0]]


async def test_the_beta_client(running: Gateway, client: Messages, stream: bool) -> None:
    body = client.body(client.user("PLAY:calls"), Wish(tools=[SHELL]))
    betas = ["interleaved-thinking-2025-05-14", "context-management-2025-06-27"]
    editing = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    body |= {"betas": betas, "context_management": editing}
    if stream:
        async with client.client.beta.messages.stream(**body) as events:
            message: Any = await events.get_final_message()
    else:
        message = await client.client.beta.messages.create(**body)
    answer = client.answer(message)
    assert (answer.reasoning, answer.text, answer.finish) == ("Hm.", "I look.", "tool_calls")
    assert answer.calls[0].arguments == {"command": "ls", "timeout": 1.0}
    (exchange,) = await running.recorded(answer)
    assert exchange.hints["anthropic-beta"] == ",".join(betas)


async def test_arguments_that_are_no_json(running: Gateway, client: Messages) -> None:
    """Neither mended nor dropped: they come as the model wrote them, and so does what claude-code makes of them."""
    wish = Wish(tools=[SHELL])
    history = client.user("PLAY:garbled")
    blocks: list[dict[str, Any]] = []
    written = ""
    async for event in await client.client.messages.create(**client.body(history, wish), stream=True):
        if event.type == "content_block_start":
            blocks.append(event.content_block.model_dump(exclude_none=True))
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            blocks[-1]["text"] += event.delta.text
        elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            written += event.delta.partial_json
    assert written == '{"command": oops}'
    blocks[-1]["input"] = {"__unparsedToolInput": {"raw": written, "len": len(written)}}
    result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "No JSON.", "is_error": True}
    history += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    await client.ask(history, wish=wish)
    one, other = await running.exchanges()
    exact(one)
    exact(other)
    assert one.sampled_ids is not None
    said = running.engine.tokenizer.decode(one.sampled_ids.tolist())
    assert running.prompt_text(other).startswith(running.prompt_text(one) + said)


# Errors, as harnesses tell them apart


async def failure(call: Any) -> tuple[type[Exception], int, str]:
    with pytest.raises(anthropic.APIStatusError) as caught:
        await call
    body: Any = caught.value.body
    assert body["type"] == "error"
    return type(caught.value), caught.value.status_code, body["error"]["type"]


async def test_errors_have_anthropics_types(running: Gateway, client: Messages, stream: bool) -> None:
    async def ask(words: str, **extra: Any) -> None:
        await client.ask(client.user(words), stream=stream, wish=Wish(extra=extra))

    with pytest.raises(
        anthropic.BadRequestError, match="prompt is too long"
    ):  # the words that make claude-code compact
        await ask("word " * 5000)
    assert await failure(ask("PLAY:429")) == (anthropic.RateLimitError, 429, "rate_limit_error")
    assert (await failure(ask("PLAY:503")))[1:] == (529, "overloaded_error")
    refused = (anthropic.BadRequestError, 400, "invalid_request_error")
    assert await failure(ask("x", extra_body={"max_tokens": "many"})) == refused
    assert await failure(ask("x", messages=[])) == refused
    assert await failure(ask("x", messages=[{"role": "user", "content": [{"type": "hologram"}]}])) == refused
    assert len(await running.exchanges()) == 3  # those that an engine was asked for


async def test_a_path_that_is_not_there(running: Gateway, client: Messages) -> None:
    wanted = client.client.messages.batches.create(requests=[])
    assert await failure(wanted) == (anthropic.NotFoundError, 404, "not_found_error")


async def test_a_key_as_bearer_token(running: Gateway) -> None:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(auth_token=running.key, base_url=running.url, http_client=http) as bearer:
        message = await bearer.messages.create(
            model=MODEL, max_tokens=99, messages=[{"role": "user", "content": "Hello."}]
        )
    assert message.content[0].type == "text"
    (exchange,) = await running.exchanges()
    exact(exchange)
    assert not any(running.key in value for value in exchange.hints.values())
