"""The engine over HTTP: vLLM's routes and fields, exact ids and log-probabilities, stops, limits, pauses, versions."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from polar.engines.scripted import Play, PlaySet, ScriptedTurn
from tests.unit.engines.scripted.client import BASH, CAPTURE, HELLO, Client, events, expected, merged, serving, whole

RANDOM = Play.random(11, turns=3, words=60)


async def turn_messages(client: Client, messages: list[Any], **fields: Any) -> list[Any]:
    """The messages after one more turn, with the model's reply and a tool's result, as a harness sends them back."""
    reply = await client.chat(messages=messages, tools=[BASH], **fields)
    message = reply["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in message.get("tool_calls", [])]
    return [*messages, {k: v for k, v in message.items() if v is not None}, *results]


async def test_ids_and_log_probabilities_are_exact_whole_and_streamed() -> None:
    async with serving(RANDOM, drift=0.3) as client:
        messages = list(HELLO)
        for turn in range(3):
            fields = {"messages": messages, "tools": [BASH], **CAPTURE}
            at_once, streamed = whole(await client.chat(**fields)), merged(await client.stream(**fields))
            assert at_once == streamed
            assert at_once["text"] == RANDOM.turns[turn].text
            assert at_once["reasoning"] == RANDOM.turns[turn].reasoning
            assert at_once["finish"] == ("stop" if turn == 2 else "tool_calls")
            assert [json.loads(a) for _, a in at_once["calls"]] == [
                {"command": c} for c in [RANDOM.turns[turn].shell] if c
            ]
            assert at_once["logprobs"] == expected(at_once["prompt"], at_once["ids"], [(0, 0, len(at_once["ids"]))])
            count = await client.post("/tokenize", messages=messages, tools=[BASH])
            assert count["tokens"] == at_once["prompt"]
            assert count["count"] == len(at_once["prompt"])
            assert count["max_model_len"] == 131072
            messages = await turn_messages(client, messages)


async def test_a_turn_that_is_sent_back_renders_to_the_sampled_text_with_other_ids() -> None:
    async with serving(RANDOM, drift=0.3) as client:
        first = whole(await client.chat(tools=[BASH], **CAPTURE))
        sampled = first["prompt"] + first["ids"]
        messages = await turn_messages(client, list(HELLO))
        second = (await client.post("/tokenize", messages=messages, tools=[BASH]))["tokens"]
        texts = [(await client.post("/detokenize", tokens=ids))["prompt"] for ids in (sampled, second)]
        assert texts[1].startswith(texts[0])
        assert second[: len(sampled)] != sampled


async def test_ids_alone_tell_as_much_as_the_messages() -> None:
    """A gateway that renders prompts itself gets the same reply from the token-in, token-out route."""
    plays = PlaySet(RANDOM, {"other": Play([ScriptedTurn(text="The other play."), ScriptedTurn(text="Its end.")])})
    async with serving(plays) as client:
        messages: list[Any] = [{"role": "system", "content": "PLAY:other is for users to say."}, *HELLO]
        for _ in range(3):
            by_chat = whole(await client.chat(messages=messages, tools=[BASH], **CAPTURE))
            by_ids = await client.post(
                "/inference/v1/generate",
                token_ids=by_chat["prompt"],
                sampling_params={"logprobs": 1, "max_tokens": 4000},
                return_token_ids=True,
            )
            (choice,) = by_ids["choices"]
            assert choice["token_ids"] == by_chat["ids"]
            assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == by_chat["ids"]
            assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == by_chat["logprobs"]
            assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(by_chat["ids"])}]
            assert by_ids["prompt_token_ids"] == by_chat["prompt"]
            chunks = await client.stream(
                "/inference/v1/generate", token_ids=by_chat["prompt"], sampling_params={"logprobs": 0}
            )
            assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == by_chat["ids"]
            assert [chunk["choices"][0]["weight_versions"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1]["choices"][0]["weight_versions"] == choice["weight_versions"]
            messages = await turn_messages(client, messages)
        messages.append({"role": "user", "content": "Now PLAY:other for me."})
        ids = (await client.post("/tokenize", messages=messages))["tokens"]
        said = await client.post("/v1/completions", prompt=ids, max_tokens=100)
        assert said["choices"][0]["text"] == "The other play."


async def test_text_that_spells_a_control_token_is_no_turn() -> None:
    async with serving(Play([ScriptedTurn(text="first"), ScriptedTurn(text="second")])) as client:

        async def ids(text: str) -> list[int]:
            return (await client.post("/tokenize", prompt=text))["tokens"]  # type: ignore[no-any-return]

        spelled = await ids("<|im") + await ids("_start|>") + await ids("assistant\nsaid<|") + await ids("im_end|>")
        meant = await ids("<|im_start|>assistant\nsaid<|im_end|>")
        for middle, text in ((spelled, "first"), (meant, "second")):
            prompt = await ids("<|im_start|>user\nhello") + middle + await ids("<|im_end|>\n<|im_start|>assistant\n")
            assert (await client.post("/v1/completions", prompt=prompt))["choices"][0]["text"] == text


async def test_pictures_are_taken_and_not_looked_at() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    async with serving() as client:
        assert await client.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "this?"}, picture]}])


async def test_the_official_client_understands_streams_and_replies() -> None:
    async with serving() as client, AsyncOpenAI(base_url=client.url + "/v1", api_key="none") as official:
        tools: Any = [BASH]
        async with official.chat.completions.stream(model="scripted", messages=HELLO, tools=tools) as stream:
            final = await stream.get_final_completion()
        reply = await official.chat.completions.create(model="scripted", messages=HELLO, tools=tools)
        for message in (final.choices[0].message, reply.choices[0].message):
            assert message.content == "Creating the file."
            (call,) = message.tool_calls or []
            assert call.type == "function"
            assert json.loads(call.function.arguments) == {"command": "echo 'hello from polar' > polar.txt"}
        assert final.choices[0].finish_reason == reply.choices[0].finish_reason == "tool_calls"
        (model,) = (await official.models.list()).data
        assert model.id == "scripted"


async def test_the_default_play_runs_to_its_end() -> None:
    async with serving() as client:
        messages, texts = list(HELLO), []
        for _ in range(4):
            reply = await client.chat(messages=messages, tools=[BASH])
            texts.append(reply["choices"][0]["message"]["content"])
            messages = await turn_messages(client, messages)
        assert texts == ["Creating the file.", "Reading it back.", *["Done: polar.txt says hello from polar."] * 2]
        assert (await client.chat())["choices"][0]["message"]["content"] == "A short note on the task."


async def test_plays_are_selected_by_a_user_message() -> None:
    child = Play([ScriptedTurn(text="I am the child."), ScriptedTurn(text="Still the child.")])
    parent = [*HELLO, {"role": "assistant", "content": "Starting a child."}, {"role": "tool", "content": "PLAY:child"}]
    async with serving(
        PlaySet(Play([ScriptedTurn(text="first"), ScriptedTurn(text="second")]), {"child": child})
    ) as client:

        async def said(*messages: Any) -> str:
            return whole(await client.chat(messages=list(messages), **CAPTURE))["text"]  # type: ignore[no-any-return]

        order = {"role": "user", "content": [{"type": "text", "text": "Do it. PLAY:child, quickly"}]}
        assert await said(order) == "I am the child."
        assert await said(order, {"role": "assistant", "content": "x"}) == "Still the child."
        assert await said(*parent) == "second", "a tool's result selects nothing"
        assert await said(*parent, order) == "I am the child.", "a forked context counts from its own order"
        assert await said({"role": "user", "content": "PLAY:nobody"}) == "first"


async def test_plays_are_selected_by_what_a_user_message_says() -> None:
    """So that the tasks of one run each have their own, and the texts of the tasks know nothing of it."""
    named = {
        "sort": Play([ScriptedTurn(text="sorting"), ScriptedTurn(text="sorted")], match=r"Sort \S+ by name"),
        "count": Play([ScriptedTurn(text="counting"), ScriptedTurn(text="counted")], match="Count the"),
    }
    sort: Any = {"role": "user", "content": "<env>here</env>\nSort people.csv by name."}
    count: Any = {"role": "user", "content": "Count the lines. Sort people.csv by name, PLAY:count please."}
    reply: Any = {"role": "assistant", "content": "x"}
    async with serving(PlaySet(Play([ScriptedTurn(text="first"), ScriptedTurn(text="second")]), named)) as client:

        async def said(*messages: Any) -> str:
            text = whole(await client.chat(messages=list(messages), **CAPTURE))["text"]
            ids = (await client.post("/tokenize", messages=list(messages)))["tokens"]
            by_ids = await client.post("/v1/completions", prompt=ids, max_tokens=100)
            assert by_ids["choices"][0]["text"] == text
            return str(text)

        assert await said(*HELLO) == "first"
        assert await said(sort) == "sorting"
        assert await said(sort, reply) == "sorted"
        assert await said(sort, reply, {"role": "tool", "content": "Count the"}) == "sorted"
        assert await said(sort, reply, sort) == "sorted", "a reminder begins nothing"
        assert await said(sort, reply, {"role": "user", "content": "Count the words."}) == "counting"
        assert await said(count) == "counting", "a name comes before what a message says"
        assert await said({"role": "system", "content": "Count the"}, *HELLO) == "first"


async def test_stop_strings() -> None:
    async with serving(Play([ScriptedTurn(text="one two three four")])) as client:
        for stop, text in ((" three", "one two"), (["zzz", "e t", "two"], "on"), ("r", "one two th")):
            at_once = await client.chat(stop=stop, **CAPTURE)
            streamed = await client.stream(stop=stop, **CAPTURE)
            assert whole(at_once) == merged(streamed)
            assert whole(at_once)["text"] == text
            (choice,) = at_once["choices"]
            assert choice["finish_reason"] == "stop"
            assert choice["stop_reason"] in stop
            assert streamed[-1]["choices"][0]["stop_reason"] == choice["stop_reason"]
            sampled = (await client.post("/detokenize", tokens=choice["token_ids"]))["prompt"]
            assert choice["stop_reason"] in sampled
            assert sampled.startswith(text)
            before = (await client.post("/detokenize", tokens=choice["token_ids"][:-1]))["prompt"]
            assert choice["stop_reason"] not in before, "the last token is the one that completes the stop string"
        shown = await client.chat(stop="two", include_stop_str_in_output=True)
        assert shown["choices"][0]["message"]["content"] == "one two"
        everything = await client.chat(stop="five")
        assert everything["choices"][0]["stop_reason"] is None
        ids = whole(await client.chat(**CAPTURE))["ids"]
        cut = await client.chat(stop_token_ids=[ids[2]], **CAPTURE)
        assert cut["choices"][0]["token_ids"] == ids[:3]
        assert cut["choices"][0]["stop_reason"] == ids[2]


async def test_length() -> None:
    async with serving(
        Play([ScriptedTurn(text="one two three four", reasoning="so"), ScriptedTurn(text="x", finish_reason="length")])
    ) as client:
        full = whole(await client.chat(**CAPTURE))
        for field in ("max_tokens", "max_completion_tokens"):
            fields = {**CAPTURE, field: 5}
            at_once, streamed = await client.chat(**fields), await client.stream(**fields)
            assert whole(at_once) == merged(streamed)
            assert whole(at_once)["ids"] == full["ids"][:5]
            assert whole(at_once)["finish"] == "length"
            assert at_once["usage"]["completion_tokens"] == 5
        exact = whole(await client.chat(max_tokens=len(full["ids"]), **CAPTURE))
        assert exact == full
        messages = [*HELLO, {"role": "assistant", "content": "y"}]
        played = whole(await client.chat(messages=messages, **CAPTURE))
        assert (played["text"], played["finish"]) == ("x", "length")


async def test_the_context_length_is_kept_as_vllm_does() -> None:
    async with serving(max_model_len=40) as client:
        prompt = (await client.post("/tokenize", messages=HELLO))["count"]
        assert await client.chat(max_tokens=40 - prompt)
        limit = "This model's maximum context length is 40 tokens"
        bodies: list[dict[str, Any]] = [
            {"max_tokens": 41 - prompt},
            {"messages": [{"role": "user", "content": "word " * 100}]},
        ]
        for body in bodies:
            error = (await client.post("/v1/chat/completions", status=400, **{"messages": HELLO, **body}))["error"]
            assert error["message"].startswith(limit)
            assert error["type"] == "BadRequestError"
            assert error["code"] == 400
        reply = await client.chat()
        assert reply["usage"]["total_tokens"] <= 40


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {}, 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": HELLO, "n": 2}, 400),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 0}, 400),
        ("/v1/chat/completions", {"messages": HELLO, "model": "another"}, 404),
        ("/v1/chat/completions", {"messages": [{"role": "critic", "content": ""}]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, 400),
        ("/v1/completions", {"prompt": ["two", "prompts"]}, 400),
        ("/v1/completions", {"prompt": [1, "two"]}, 400),
        ("/v1/completions", {"prompt": []}, 400),
        ("/inference/v1/generate", {"token_ids": [10**6], "sampling_params": {}}, 400),
        ("/inference/v1/generate", {"token_ids": [-1], "sampling_params": {}}, 400),
        ("/detokenize", {"tokens": [2**40]}, 400),
        ("/update_weight_version", {"new_version": "latest"}, 400),
        ("/pause?mode=sometimes", {}, 400),
    ],
)
async def test_bad_requests_get_vllms_errors(path: str, body: dict[str, Any], status: int) -> None:
    async with serving() as client:
        error = (await client.post(path, status=status, **body))["error"]
        assert error["code"] == status
        assert error["message"]


async def test_completions() -> None:
    async with serving(Play([ScriptedTurn(text="one two three", reasoning="hm")])) as client:
        fields: dict[str, Any] = {"prompt": "Say something", "max_tokens": 50, "logprobs": 1, "return_token_ids": True}
        reply = await client.post("/v1/completions", **fields)
        (choice,) = reply["choices"]
        assert choice["text"] == "<think>hm</think>one two three"
        assert choice["finish_reason"] == "stop"
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == expected(
            choice["prompt_token_ids"], choice["token_ids"], [(0, 0, len(choice["token_ids"]))]
        )
        assert "".join(logprobs["tokens"]) == choice["text"] + "<|im_end|>"
        assert logprobs["text_offset"][1] == len("<think>")
        chunks = await client.stream("/v1/completions", stream_options={"include_usage": True}, **fields)
        *parts, usage = chunks
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(choice["token_ids"])
        assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]
        assert [id for part in parts for id in part["choices"][0]["token_ids"]] == choice["token_ids"]
        assert parts[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
        offsets = [offset for part in parts for offset in part["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == logprobs["text_offset"]
        for prompt in (["Say something"], [choice["prompt_token_ids"]], choice["prompt_token_ids"]):
            again = await client.post("/v1/completions", **{**fields, "prompt": prompt})
            assert again["choices"][0]["token_ids"] == choice["token_ids"]


async def test_usage_and_the_prefix_cache() -> None:
    async with serving(RANDOM, drift=0) as client:
        messages = [{"role": "system", "content": "word " * 100}, *HELLO]
        *_, usage = await client.stream(messages=messages, tools=[BASH], stream_options={"include_usage": True})
        assert usage["choices"] == []
        first = usage["usage"]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert 0 < first["completion_tokens_details"]["reasoning_tokens"] < first["completion_tokens"]
        assert first["total_tokens"] == first["prompt_tokens"] + first["completion_tokens"]
        again = await client.chat(messages=messages, tools=[BASH])
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (first["prompt_tokens"] - 1) // 16 * 16
        messages = await turn_messages(client, messages)
        next_turn = (await client.chat(messages=messages, tools=[BASH]))["usage"]
        cached = next_turn["prompt_tokens_details"]["cached_tokens"]
        assert first["total_tokens"] - 16 < cached < next_turn["prompt_tokens"], "what was sampled is cached, too"
        await client.post("/reset_prefix_cache")
        after = await client.chat(messages=messages, tools=[BASH])
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_what_was_not_asked_for_is_not_there() -> None:
    async with serving() as client:
        reply = await client.chat()
        assert reply["prompt_token_ids"] is None
        assert reply["choices"][0]["token_ids"] is None
        assert reply["choices"][0]["logprobs"] is None
        assert all("usage" not in chunk for chunk in await client.stream())


async def test_top_log_probabilities() -> None:
    async with serving() as client:
        reply = await client.chat(logprobs=True, top_logprobs=3)
        for entry in reply["choices"][0]["logprobs"]["content"]:
            assert len(entry["top_logprobs"]) == 3
            assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
            assert bytes(entry["bytes"]).decode() == entry["token"]


async def test_seeds_change_the_ids_and_never_the_text() -> None:
    async with serving(RANDOM, drift=0.3) as client:
        replies = [whole(await client.chat(tools=[BASH], seed=seed, **CAPTURE)) for seed in (1, 1, 2)]
        assert replies[0] == replies[1]
        assert replies[0]["ids"] != replies[2]["ids"]
        assert replies[0]["text"] == replies[2]["text"]


async def test_tool_choice() -> None:
    async with serving(Play([ScriptedTurn(text="I say <tool_call>nothing", shell="ls")], aside="aside")) as client:
        none = whole(await client.chat(tools=[BASH], tool_choice="none", **CAPTURE))
        assert (none["text"], none["calls"], none["finish"]) == ("aside", [], "stop")
    async with serving(Play([ScriptedTurn(text="no call")])) as client:
        for choice, finish in (
            ("required", "tool_calls"),
            ({"type": "function", "function": {"name": "bash"}}, "stop"),
        ):
            forced = whole(await client.chat(tools=[BASH], tool_choice=choice, **CAPTURE))
            assert forced["calls"] == [["bash", '{"command": "run it"}']]
            assert forced["finish"] == finish
            assert merged(await client.stream(tools=[BASH], tool_choice=choice, **CAPTURE)) == forced


async def test_malformed_calls_come_out_as_vllm_lets_them() -> None:
    raw = 'Trying.<tool_call>{"name": "bash", "arguments": {"command": oops}}</tool_call>'
    async with serving(Play([ScriptedTurn(raw=raw)])) as client:
        streamed = merged(await client.stream(tools=[BASH], **CAPTURE))
        assert streamed["calls"] == [["bash", '{"command": oops}']]
        assert streamed["finish"] == "tool_calls"
        at_once = whole(await client.chat(tools=[BASH], **CAPTURE))
        assert (at_once["text"], at_once["calls"], at_once["finish"]) == (raw, [], "stop")
        assert at_once["ids"] == streamed["ids"]


async def test_thinking_that_the_prompt_has_settled() -> None:
    async with serving(Play([ScriptedTurn(text="yes", reasoning="hm")])) as client:
        off = whole(await client.chat(chat_template_kwargs={"enable_thinking": False}, **CAPTURE))
        assert (off["text"], off["reasoning"]) == ("yes", "")


async def test_several_tokens_a_chunk() -> None:
    async with serving(RANDOM) as single, serving(RANDOM, tokens_per_chunk=7) as client:
        chunks = await client.stream(tools=[BASH], **CAPTURE)
        assert {len(chunk["choices"][0]["token_ids"]) for chunk in chunks[1:-1]} == {7}
        assert merged(chunks) == merged(await single.stream(tools=[BASH], **CAPTURE))


async def test_models_health_version() -> None:
    async with serving(model="m", max_model_len=77) as client:
        (card,) = (await client.get("/v1/models"))["data"]
        assert (card["id"], card["max_model_len"]) == ("m", 77)
        assert await client.get("/health") is None
        assert (await client.get("/version"))["version"].startswith("scripted-")
        strings = await client.post("/tokenize", prompt="a b", return_token_strs=True)
        assert strings["token_strs"] == ["a", "Ġb"]


async def test_a_pause_holds_generations_and_a_new_version_shows_in_the_spans() -> None:
    """The generation runs across two weight updates, each made while it stands still."""
    async with serving(Play([ScriptedTurn(text="word " * 300, token_delay=0.001)]), version=4) as client:
        prompt = (await client.post("/tokenize", messages=HELLO))["tokens"]
        body = {"token_ids": prompt, "sampling_params": {"logprobs": 0}, "stream": True}
        received = b""
        async with client.session.post(client.url + "/inference/v1/generate", json=body) as response:
            for version in (5, 6):
                for _ in range(10):
                    received += await response.content.readuntil(b"\n\n")
                assert (await client.post("/pause"))["status"] == "paused"
                assert (await client.get("/is_paused"))["is_paused"]
                await client.post("/update_weight_version", new_version=str(version))
                await client.post("/resume")
            received += await response.content.read()
        steps = [event["choices"][0] for event in events(received)]
        ids = [id for step in steps for id in step["token_ids"]]
        values = [entry["logprob"] for step in steps for entry in step["logprobs"]["content"]]
        spans = [(int(span["version"]), span["start"], span["end"]) for span in steps[-1]["weight_versions"]]
        assert [version for version, _, _ in spans] == [4, 5, 6]
        assert [stop for _, _, stop in spans] == [*(start for _, start, _ in spans[1:]), len(ids)]
        assert values == expected(prompt, ids, spans)
        assert (await client.get("/weight_info")) == {"weight_version": "6"}


async def test_while_paused_nothing_is_sampled() -> None:
    async with serving(version=1) as client:
        await client.post("/pause?mode=keep")
        asked = asyncio.create_task(client.chat(**CAPTURE))
        await client.running(1)
        await client.post("/update_weight_version", version=2)
        assert not asked.done()
        await client.post("/resume")
        reply = whole(await asked)
        assert reply["logprobs"] == expected(reply["prompt"], reply["ids"], [(2, 0, len(reply["ids"]))])


@pytest.mark.parametrize(("mode", "finish"), [("abort", "abort"), ("wait", "stop"), ("keep", "stop")])
async def test_pause_modes(mode: str, finish: str) -> None:
    async with serving(Play([ScriptedTurn(text="word " * 100, token_delay=0.001)])) as client:
        body = {"messages": HELLO, "stream": True, **CAPTURE}
        async with client.session.post(client.url + "/v1/chat/completions", json=body) as response:
            begun = await response.content.readuntil(b"\n\n")
            await client.post(f"/pause?mode={mode}")
            held = asyncio.create_task(client.chat(**CAPTURE))
            await client.running(2 if mode == "keep" else 1)
            assert not held.done(), "a new generation waits in every mode"
            if mode == "keep":
                await client.post("/resume")
            reply = merged(events(begun + await response.read()))
        await client.post("/resume")
        full = whole(await held)
        assert (reply["finish"], full["finish"]) == (finish, "stop")
        assert (reply["ids"] == full["ids"]) == (mode != "abort")
        assert reply["ids"] == full["ids"][: len(reply["ids"])]
        assert reply["logprobs"] == expected(reply["prompt"], reply["ids"], [(0, 0, len(reply["ids"]))])
        log = await client.log()
        assert (log["completed"], log["aborted"]) == ((1, 1) if mode == "abort" else (2, 0))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_aborts_its_generation(stream: bool) -> None:
    async with serving(Play([ScriptedTurn(text="word " * 1000, token_delay=0.01)])) as client:
        body = {"messages": HELLO, "stream": stream}
        asked = asyncio.create_task(client.session.post(client.url + "/v1/chat/completions", json=body))
        await client.running(1)
        if stream:
            (await asked).close()
        else:
            asked.cancel()
        await client.running(0)
        assert (await client.log())["aborted"] == 1


async def test_many_streams_at_once() -> None:
    async with serving(RANDOM, rate=2000) as client:
        replies = await asyncio.gather(*(client.stream(tools=[BASH], seed=seed, **CAPTURE) for seed in range(40)))
        for reply in map(merged, replies):
            assert reply["logprobs"] == expected(reply["prompt"], reply["ids"], [(0, 0, len(reply["ids"]))])
        assert (await client.log())["completed"] == 40


def test_the_command(tmp_path: Path) -> None:
    play = tmp_path / "play.toml"
    play.write_text('[[turns]]\ntext = "from the file"\n')
    command = [sys.executable, "-m", "polar.engines.scripted", "--port", "0", "--play", str(play), "--model", "m"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on http://127.0.0.1:")
            asyncio.run(ask(line.split()[-1]))
        finally:
            process.terminate()
    assert process.returncode == 0
    broken = subprocess.run([*command[:5], "--play", "no.toml"], capture_output=True, text=True, check=False)
    assert broken.returncode == 1
    assert "no.toml" in broken.stderr


async def ask(url: str) -> None:
    async with AsyncOpenAI(base_url=url + "/v1", api_key="none") as official:
        reply = await official.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        assert reply.choices[0].message.content == "from the file"
