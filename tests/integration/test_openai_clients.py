"""OpenAI's own client, where its APIs differ from the others: see `test_clients` for what all can do."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from polar.engines.scripted import Play, PlaySet, ScriptedTurn
from polar.engines.scripted.play import ScriptedCall as PlayedCall
from tests.integration.clients import MODEL, Chat, Responses, Wish, tool
from tests.integration.listening import Gateway, exact, gateway

WORDS = "One two three, four; fünf — 六 🙂 eight STOP nine ten."
PATCH = '*** Begin Patch\n+ say "hällo"\n*** End Patch'

PLAYS = PlaySet(
    Play([ScriptedTurn(text=WORDS)]),
    {
        "patch": Play(
            [ScriptedTurn(text="So:", calls=[PlayedCall("apply_patch", {"input": PATCH})]), ScriptedTurn(text="Done.")]
        ),
        "agents": Play(
            [ScriptedTurn(calls=[PlayedCall("agents__spawn", {"task": "count"})]), ScriptedTurn(text="Done.")]
        ),
        "thinks": Play([ScriptedTurn(reasoning="Hm.", text="Yes.")]),
        "spoiled": Play([ScriptedTurn(text=WORDS, logprobs="nan")]),
    },
)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway(tmp_path, PLAYS, max_model_len=4096) as started:
        yield started


@pytest.fixture
async def chat(running: Gateway) -> AsyncIterator[Chat]:
    client = Chat(running.url, running.key)
    yield client
    await client.close()


@pytest.fixture
async def responses(running: Gateway) -> AsyncIterator[Responses]:
    client = Responses(running.url, running.key)
    yield client
    await client.close()


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# Chat Completions


async def test_chat_system_and_developer_messages_stay_where_they_stand(running: Gateway, chat: Chat) -> None:
    history: list[dict[str, Any]] = [
        {"role": "developer", "content": "Rule one."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "system", "content": "Rule two."},
        {"role": "user", "content": [{"type": "text", "text": "Go."}], "name": "ann"},
    ]
    (exchange,) = await running.recorded(await chat.ask(history))
    assert running.prompt_text(exchange) == (
        "<|im_start|>system\nRule one.<|im_end|>\n"
        "<|im_start|>user\nHello.<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>system\nRule two.<|im_end|>\n"
        "<|im_start|>user\nGo.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [message["role"] for message in running.engine.heard[-1]["messages"]] == [
        message["role"] for message in history
    ]


async def test_chat_log_probabilities_for_the_harness(running: Gateway, chat: Chat, stream: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": chat.user("Go."), "logprobs": True, "top_logprobs": 2}
    seen = []
    if stream:
        async for chunk in await chat.client.chat.completions.create(**body, stream=True):
            seen += [token for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content or ()]
    else:
        completion = await chat.client.chat.completions.create(**body)
        seen = completion.choices[0].logprobs.content
    (exchange,) = await running.exchanges()
    exact(exchange)
    assert exchange.logprobs is not None
    assert [token.logprob for token in seen] == pytest.approx(exchange.logprobs.tolist())
    assert all(len(token.top_logprobs) == 2 for token in seen)


async def test_chat_log_probabilities_that_the_engine_lacks(running: Gateway, chat: Chat, stream: bool) -> None:
    """The harness still gets its reply; only training does without."""
    answer = await chat.ask(chat.user("PLAY:spoiled"), stream=stream, wish=Wish(extra={"logprobs": True}))
    assert answer.text == WORDS
    (exchange,) = await running.exchanges()
    assert (exchange.status, exchange.untrainable) == ("complete", "logprobs_nan")
    if not stream:
        shown = [token.logprob for token in answer.native.choices[0].logprobs.content]
        assert shown.count(-9999.0) == 1


async def test_chat_usage_in_a_stream_only_where_asked_for(running: Gateway, chat: Chat) -> None:
    chunks = [
        chunk
        async for chunk in await chat.client.chat.completions.create(
            model=MODEL, messages=chat.user("Go."), stream=True
        )
    ]
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    (exchange,) = await running.exchanges()
    exact(exchange)


async def test_chat_streams_token_by_token(running: Gateway, chat: Chat) -> None:
    chunks = [
        chunk.choices[0].delta.content
        async for chunk in await chat.client.chat.completions.create(
            model=MODEL, messages=chat.user("Go."), stream=True
        )
    ]
    pieces = [piece for piece in chunks if piece]
    assert "".join(pieces) == WORDS
    (exchange,) = await running.exchanges()
    _, sampled = exact(exchange)
    assert len(pieces) > sampled / 2


async def test_chat_custom_tools(running: Gateway, chat: Chat, stream: bool) -> None:
    custom = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edits files."}}
    body: dict[str, Any] = {"model": MODEL, "messages": chat.user("PLAY:patch"), "tools": [custom]}
    if stream:
        call: dict[str, Any] = {}
        async for chunk in await chat.client.chat.completions.create(**body, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or ():
                told = piece.model_dump(exclude_none=True)
                call["id"] = told.get("id") or call["id"]
                call["type"] = told.get("type") or call["type"]
                for name, value in told["custom"].items():
                    call[name] = call.get(name, "") + value
    else:
        (found,) = (await chat.client.chat.completions.create(**body)).choices[0].message.tool_calls
        call = {"id": found.id, "type": found.type, "name": found.custom.name, "input": found.custom.input}
    assert call == {"id": call["id"], "type": "custom", "name": "apply_patch", "input": PATCH}
    (exchange,) = await running.exchanges()
    exact(exchange)
    assert running.engine.heard[-1]["tools"][0]["function"]["name"] == "apply_patch"  # engines know functions only

    echoed = {
        "role": "assistant",
        "content": "So:",
        "tool_calls": [{"id": call["id"], "type": "custom", "custom": {"name": call["name"], "input": call["input"]}}],
    }
    result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    body["messages"] += [echoed, result]
    second = await chat.client.chat.completions.create(**body)
    assert second.choices[0].message.content == "Done."
    first, then = await running.exchanges()
    assert first.sampled_ids is not None
    said = running.engine.tokenizer.decode(first.sampled_ids.tolist())
    assert running.prompt_text(then).startswith(running.prompt_text(first) + said)


async def test_chat_reasoning_can_be_hidden(running: Gateway, chat: Chat, stream: bool) -> None:
    answer = await chat.ask(
        chat.user("PLAY:thinks"), stream=stream, wish=Wish(extra={"extra_body": {"include_reasoning": False}})
    )
    assert (answer.reasoning, answer.text) == ("", "Yes.")
    (exchange,) = await running.recorded(answer)
    assert exchange.reply is not None
    assert [type(part).__name__ for part in exchange.reply.parts] == ["Reasoning", "Text"]


# Completions


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
async def test_completions(running: Gateway, chat: Chat, stream: bool, as_ids: bool) -> None:
    text = "Once upon a time"
    ids = running.engine.tokenizer.encode(text)
    body: dict[str, Any] = {"model": MODEL, "prompt": ids if as_ids else text, "max_tokens": 100, "stop": "STOP"}
    said, finish, usage = "", None, None
    if stream:
        async for chunk in await chat.client.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                said += choice.text
                finish = choice.finish_reason or finish
    else:
        completion = await chat.client.completions.create(**body)
        said, finish, usage = completion.choices[0].text, completion.choices[0].finish_reason, completion.usage
        assert completion.id.startswith("cmpl-x")
    assert said == WORDS.partition("STOP")[0]
    assert finish == "stop"
    (exchange,) = await running.exchanges()
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == exact(exchange)
    assert exchange.prompt_ids is not None
    assert exchange.prompt_ids.tolist() == ids
    assert exchange.untrainable is None


async def test_completions_with_log_probabilities(running: Gateway, chat: Chat, stream: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": "Go.", "logprobs": 2}
    if stream:
        seen = []
        async for chunk in await chat.client.completions.create(**body, stream=True):
            seen += [value for choice in chunk.choices if choice.logprobs for value in choice.logprobs.token_logprobs]
    else:
        seen = (await chat.client.completions.create(**body)).choices[0].logprobs.token_logprobs
    (exchange,) = await running.exchanges()
    assert exact(exchange)[1] == 16  # the API's own limit where none is given
    assert exchange.finish_reason == "length"
    assert exchange.logprobs is not None
    assert seen == pytest.approx(exchange.logprobs.tolist())


async def test_completions_of_several_prompts_are_refused(running: Gateway, chat: Chat) -> None:
    with pytest.raises(openai.BadRequestError, match="2 prompts"):
        await chat.client.completions.create(model=MODEL, prompt=["one", "two"])
    assert await running.exchanges() == []


# Responses


async def test_responses_messages_stay_where_they_stand(running: Gateway, responses: Responses) -> None:
    history: list[dict[str, Any]] = [
        {"role": "developer", "content": "Rule one."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hi.", "annotations": []}]},
        {"role": "system", "content": "Rule two."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
    ]
    (exchange,) = await running.recorded(await responses.ask(history, wish=Wish(system="Rule zero.")))
    assert running.prompt_text(exchange) == (
        "<|im_start|>system\nRule zero.<|im_end|>\n"
        "<|im_start|>system\nRule one.<|im_end|>\n"
        "<|im_start|>user\nHello.<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>system\nRule two.<|im_end|>\n"
        "<|im_start|>user\nGo.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_responses_input_as_plain_text(running: Gateway, responses: Responses) -> None:
    response = await responses.client.responses.create(model=MODEL, input="Hello.", metadata={"run": "7"})
    assert response.output_text == WORDS
    assert (response.model, response.metadata) == (MODEL, {"run": "7"})
    (exchange,) = await running.exchanges()
    exact(exchange)
    assert running.prompt_text(exchange) == "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"


async def test_responses_custom_tools(running: Gateway, responses: Responses, stream: bool) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    custom = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar}
    wish = Wish(extra={"tools": [custom]})
    history = responses.user("PLAY:patch")
    first = await responses.ask(history, stream=stream, wish=wish)
    (call,) = first.calls
    assert (call.name, call.arguments) == ("apply_patch", PATCH)
    assert first.native.output[-1].type == "custom_tool_call"
    (offered,) = running.engine.heard[-1]["tools"]
    assert offered["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert "start: /.+/" in offered["function"]["description"]

    output = {"type": "custom_tool_call_output", "call_id": call.id, "output": "ok"}
    second = await responses.ask([*history, *first.echo, output], stream=stream, wish=wish)
    assert second.text == "Done."
    one, other = await running.recorded(first, second)
    assert other.parent == one.exchange_id
    assert one.sampled_ids is not None
    said = running.engine.tokenizer.decode(one.sampled_ids.tolist())
    assert running.prompt_text(other).startswith(running.prompt_text(one) + said)


async def test_responses_namespaces(running: Gateway, responses: Responses, stream: bool) -> None:
    inner = {
        "type": "function",
        "name": "spawn",
        "description": "Starts an agent.",
        "parameters": tool("spawn", "task").schema,
        "strict": False,
    }
    namespace = {"type": "namespace", "name": "agents", "description": "Other agents.", "tools": [inner]}
    wish = Wish(extra={"tools": [namespace, {"type": "web_search"}]})
    history = responses.user("PLAY:agents")
    first = await responses.ask(history, stream=stream, wish=wish)
    (call,) = first.calls
    assert (call.namespace, call.name, call.arguments) == ("agents", "spawn", {"task": "count"})
    offered = [entry["function"]["name"] for entry in running.engine.heard[-1]["tools"]]
    assert offered == ["agents__spawn"]  # the search is the provider's own, and no engine has it

    output = {"type": "function_call_output", "call_id": call.id, "output": "7"}
    second = await responses.ask([*history, *first.echo, output], stream=stream, wish=wish)
    assert second.text == "Done."
    one, other = await running.recorded(first, second)
    assert one.sampled_ids is not None
    said = running.engine.tokenizer.decode(one.sampled_ids.tolist())
    assert running.prompt_text(other).startswith(running.prompt_text(one) + said)


async def test_responses_tokens_are_counted_without_sampling(running: Gateway, responses: Responses) -> None:
    wish = Wish(system="Be brief.", tools=[tool("shell", "command")])
    body = responses.body(responses.user("How many?"), wish)
    count = await responses.client.responses.input_tokens.count(**body)
    assert await running.exchanges() == []
    answer = await responses.ask(responses.user("How many?"), wish=wish)
    await running.recorded(answer)
    assert count.input_tokens == answer.prompt


async def test_responses_events_come_in_order(running: Gateway, responses: Responses) -> None:
    """codex acts on items as they are done, and on nothing but what has a number."""
    stream = await responses.client.responses.create(model=MODEL, input="PLAY:thinks", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.item.type for event in events if event.type == "response.output_item.done"] == [
        "reasoning",
        "message",
    ]
    (exchange,) = await running.exchanges()
    exact(exchange)


# Errors, as harnesses tell them apart


async def test_errors_have_openais_codes(running: Gateway, chat: Chat, responses: Responses) -> None:
    for client in (chat, responses):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.ask(client.user("word " * 5000))
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        await chat.ask([{"role": "nobody", "content": "x"}])
    assert caught.value.param == "messages[0]"
    with pytest.raises(openai.NotFoundError):
        await chat.client.embeddings.create(model=MODEL, input="x", encoding_format="float")
    with pytest.raises(openai.BadRequestError) as caught:
        await responses.client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_1"}])
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError):
        await chat.client.chat.completions.create(model=MODEL, messages=[])
    assert len(await running.exchanges()) == 2  # those that an engine was asked for


async def test_a_retry_of_the_clients_own_succeeds(tmp_path: Path) -> None:
    """The client tries again by itself after a 503: one call fails, the next is the reply."""
    plays = PlaySet(named={"late": Play([ScriptedTurn(text="At last.", fail=503, fail_times=1)])})
    async with gateway(tmp_path, plays) as running:
        chat = Chat(running.url, running.key)
        client = chat.client.with_options(max_retries=2)
        completion = await client.chat.completions.create(model=MODEL, messages=chat.user("PLAY:late"))
        await chat.close()
        assert completion.choices[0].message.content == "At last."
        failed, done = await running.exchanges()
        assert failed.status == "failed"
        assert failed.hints["x-stainless-retry-count"] == "0"
        assert done.hints["x-stainless-retry-count"] == "1"
        exact(done)
