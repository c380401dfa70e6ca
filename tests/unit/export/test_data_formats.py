"""Formats for whoever only wants data: pairs, labels, a folder for datasets; and which sessions go into them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from polar.cli.export import command
from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.errors import ConfigError
from polar.export.huggingface import HuggingFaceExporter
from polar.export.preference import PreferenceExporter
from polar.export.sft_tokens import IGNORE_INDEX, SftTokensExporter
from polar.rendering.tokenizer import Tokenizer
from polar.testing.conversations import ConversationBuilder, export_items, make_text_parts
from polar.types import Reasoning, Text, ToolCall
from tests.unit.export import reading
from tests.unit.export.stored import fill, session
from tests.unit.export.test_messages import SYSTEM, USER, two_turns


def answer(name: str, text: str, question: str = "List the files.") -> ConversationBuilder:
    made = ConversationBuilder(name)
    made.add_call([SYSTEM, {"role": "user", "content": question}], [Reasoning("Hm."), Text(text)])
    return made


# Pairs


def test_a_pair_is_a_better_and_a_worse_session_of_a_task() -> None:
    rewards = {"best": 1.0, "good": 0.7, "same": 0.7, "bad": 0.2, "worst": 0.0}
    items = [answer(name, name.title()).build_item(reward, task_id="t") for name, reward in rewards.items()]
    items += [answer("other", "Alone.").build_item(1.0, task_id="u")]
    exporter = PreferenceExporter()
    rows = reading.lines(export_items(exporter, items))
    pairs = [(row["metadata"]["chosen_session_id"], row["metadata"]["rejected_session_id"]) for row in rows]
    assert pairs == [("best", "worst"), ("good", "bad")]
    assert exporter.left_out == {"session with none of another reward to be paired with": 2}
    row = rows[0]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["chosen"] == [{"role": "assistant", "content": "Best", "reasoning_content": "Hm."}]
    assert row["rejected"] == [{"role": "assistant", "content": "Worst", "reasoning_content": "Hm."}]
    assert row["tools"][0]["function"]["name"] == "bash"


def test_a_pair_holds_whole_conversations_with_results_of_tools() -> None:
    long = two_turns()
    short = answer("short", "I don't know.")
    rows = reading.lines(
        export_items(PreferenceExporter(), [long.build_item(1.0, task_id="t"), short.build_item(0.0, task_id="t")])
    )
    assert [message["role"] for message in rows[0]["chosen"]] == ["assistant", "tool", "assistant"]
    assert [message["role"] for message in rows[0]["rejected"]] == ["assistant"]


def test_sessions_that_began_otherwise_are_no_pair() -> None:
    exporter = PreferenceExporter()
    items = [
        answer("a", "Yes.").build_item(1.0, task_id="t"),
        answer("b", "No.", "Another question?").build_item(0.0, task_id="t"),
    ]
    assert export_items(exporter, items) == b""
    assert exporter.left_out.total() == 2


def test_a_session_of_several_conversations_is_no_side_of_a_pair() -> None:
    anew = ConversationBuilder("anew")
    anew.add_call([USER], make_text_parts("One."))
    anew.add_call([{"role": "user", "content": "Here is what you did so far."}], make_text_parts("Two."))
    exporter = PreferenceExporter()
    export_items(exporter, [anew.build_item(1.0, task_id="t")])
    assert exporter.left_out == {"session of no conversation, or of several": 1}


# Tokens


def test_labels_are_the_recorded_tokens_that_train() -> None:
    item = two_turns().build_item()
    exporter = SftTokensExporter()
    rows = reading.lines(export_items(exporter, [item]))
    assert len(rows) == len(item.trajectory.traces)
    for row, trace in zip(rows, item.trajectory.traces, strict=True):
        ids, labels = np.array(row["input_ids"]), np.array(row["labels"])
        assert ids.tolist() == [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        own = labels != IGNORE_INDEX
        assert (ids[own] == labels[own]).all()
        assert own[len(trace.prompt_ids) :].tolist() == (trace.loss_mask == 1).tolist()
        assert not own[: len(trace.prompt_ids)].any()
        assert row["rendered"] is False
    assert exporter.tokens == item.trajectory.tokens.trainable


def test_without_recorded_tokens_it_says_what_to_do() -> None:
    made = ConversationBuilder()
    made.add_call([USER], make_text_parts("Yes."), prompt_ids=None, sampled_ids=None, logprobs=None, delivered=0)
    exporter = SftTokensExporter()
    assert export_items(exporter, [made.build_item()]) == b""
    assert exporter.left_out == {"session without recorded tokens (--tokenizer renders it)": 1}
    rows = reading.lines(export_items(SftTokensExporter(str(TOKENIZER_FOLDER)), [made.build_item()]))
    assert [row["rendered"] for row in rows] == [True]


def test_rendered_tokens_say_what_the_session_said() -> None:
    rows = reading.lines(export_items(SftTokensExporter(str(TOKENIZER_FOLDER)), [two_turns().build_item()]))
    tokenizer = Tokenizer.load(TOKENIZER_FOLDER)
    learnt = "".join(
        tokenizer.decode([label for label in row["labels"] if label != IGNORE_INDEX]) for row in rows if row["rendered"]
    )
    assert "<think>They want files.</think>" in learnt
    assert '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call><|im_end|>' in learnt
    assert learnt.endswith("There is a.txt.<|im_end|>")
    assert "Be brief" not in learnt
    assert "Be brief" in tokenizer.decode(rows[0]["input_ids"])


# A folder


def test_a_folder_has_rows_of_fixed_types(tmp_path: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    seen = ConversationBuilder("seen")
    seen.add_call([{"role": "user", "content": [picture]}], make_text_parts("A cat."))
    pieces = ConversationBuilder("pieces")
    pieces.add_call(
        [{"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "b")]}], make_text_parts("Yes.")
    )
    exporter = HuggingFaceExporter()
    (tmp_path / "rows").write_bytes(
        export_items(exporter, [two_turns().build_item(), seen.build_item(), pieces.build_item()])
    )
    row, joined = pq.read_table(tmp_path / "rows").to_pylist()
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert row["messages"][2]["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    assert [message["content"] for message in joined["messages"]] == ["a\nb", "Yes."]
    assert json.loads(row["tools"])[0]["function"]["name"] == "bash"
    assert (row["reward"], row["role"]) == (1.0, "main")
    assert exporter.left_out == {"conversation with a picture": 1}


def export(data: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--data", str(data), *arguments])


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    def sample(name: str, index: int, number: int, **changes: Any) -> Any:
        return session(name, index, metadata={"task_id": "t", "task_key": "k", "sample": number}, **changes)

    made = [
        sample("lost", 0, 0, reason="node_lost"),
        sample("late", 1, 1, reward=1.0),
        sample("low", 2, 2, reward=0.5),
        sample("again", 3, 0, reward=1.0),
        sample("failed", 4, 3, reason="engine_failed"),
    ]
    await fill(tmp_path / "polar.db", made)
    return tmp_path


def ids(result: Result) -> list[str]:
    return [json.loads(line)["session_id"] for line in result.stdout.splitlines()]


def test_a_folder_appears_whole_and_is_not_written_over(data: Path) -> None:
    result = export(data, "--format", "huggingface", "-o", str(data / "set"))
    assert result.exit_code == 0, result.output
    assert sorted(str(one.relative_to(data / "set")) for one in (data / "set").rglob("*") if one.is_file()) == [
        "README.md",
        "data/train-00000-of-00001.parquet",
    ]
    assert "split: train" in (data / "set" / "README.md").read_text()
    again = export(data, "--format", "huggingface", "-o", str(data / "set"))
    assert "that does not exist yet" in str(again.exception)
    nowhere = export(data, "--format", "huggingface")
    assert isinstance(nowhere.exception, ConfigError)
    assert not [one for one in data.iterdir() if one.name.endswith(".partial")]


# Which sessions


def test_a_session_whose_sample_was_run_again_is_left_out(data: Path) -> None:
    result = export(data, "--format", "polar")
    assert ids(result) == ["failed", "again", "low", "late"]
    assert "1 session whose sample another session stands for was left out" in result.stderr
    assert ids(export(data, "--format", "polar", "--session", "again", "--session", "lost")) == ["again", "lost"]


def test_the_best_of_a_task_and_of_equal_ones_the_first_sample(data: Path) -> None:
    result = export(data, "--format", "polar", "--best", "1")
    assert ids(result) == ["again"]
    assert "2 sessions that others of their task outdo were left out: not among the best 1 x 2" in result.stderr
    assert ids(export(data, "--format", "polar", "--best", "2")) == ["again", "late"]


def test_the_next_best_takes_the_place_of_one_that_is_left_out(tmp_path: Path) -> None:
    nothing_trains = {ConversationBuilder("untrained").make_exchange_id(turn): "auxiliary" for turn in range(2)}
    made = [
        session("untrained", 0, reward=1.0, metadata={"task_id": "t", "sample": 0, "roles": nothing_trains}),
        session("good", 1, reward=0.75, metadata={"task_id": "t", "sample": 1}),
        session("bad", 2, reward=0.5, metadata={"task_id": "t", "sample": 2}),
    ]
    asyncio.run(fill(tmp_path / "polar.db", made))
    result = export(tmp_path, "--format", "slime", "--best", "1")
    assert [json.loads(line)["metadata"]["session_id"] for line in result.stdout.splitlines()] == ["good"] * 2, result
    assert "1 session with nothing to train was left out" in result.stderr
    assert "1 session that others of their task outdo was left out" in result.stderr


def test_of_sessions_that_say_the_same_one(data: Path) -> None:
    result = export(data, "--format", "sft", "--unique")
    assert len({json.loads(line)["metadata"]["session_id"] for line in result.stdout.splitlines()}) == 1
    assert "2 sessions that say the same as another were left out" in result.stderr


def test_what_differs_in_anything_said_is_not_the_same(tmp_path: Path) -> None:
    from polar.export.messages import digest_conversations

    def calling(name: str, arguments: str, thought: str = "Hm.") -> ConversationBuilder:
        made = ConversationBuilder(name)
        made.add_call([USER], [Reasoning(thought), ToolCall(f"{made.make_exchange_id(0)}_0", "bash", arguments)])
        return made

    one = digest_conversations(calling("a", "{}").build_item())
    assert digest_conversations(calling("b", "{}").build_item()) == one
    assert digest_conversations(calling("b", '{"a": 1}').build_item()) != one
    assert digest_conversations(calling("b", "{}", "Oh.").build_item()) != one


def test_a_tokenizer_is_for_formats_that_render(data: Path) -> None:
    assert "has no --tokenizer option" in str(export(data, "--format", "sft", "--tokenizer", "x").exception)
    assert "no folder 'x'" in str(export(data, "--format", "sft-tokens", "--tokenizer", "x").exception)
    result = export(data, "--format", "sft-tokens", "--tokenizer", str(TOKENIZER_FOLDER), "--json")
    assert json.loads(result.stderr)["tokens"] > 0
