"""Formats of text: conversations as they were held, forks and side calls told apart."""

from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ConfigDict

from polar.export.atif import AtifExporter
from polar.export.nemo_gym import NemoGymExporter
from polar.export.polar import PolarExporter
from polar.export.sft import SftExporter
from polar.testing.conversations import ConversationBuilder, export_items, make_text_parts
from polar.types import Reasoning, Text, ToolCall
from tests.unit.export import reading, schemas

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "List the files."}


def two_turns() -> ConversationBuilder:
    """A call of a tool, its result, an answer; and a title on the side."""
    talk = ConversationBuilder()
    first = talk.add_call(
        [SYSTEM, USER],
        [Reasoning("They want files."), ToolCall(f"{talk.make_exchange_id(0)}_0", "bash", '{"command": "ls"}')],
    )
    call = {"id": f"call_{first}_0", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    talk.add_call(
        [{"role": "user", "content": "A title for: List the files."}], make_text_parts("Files"), role="auxiliary"
    )
    talk.add_call(
        [
            SYSTEM,
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{first}_0", "content": "a.txt"},
        ],
        make_text_parts("There is a.txt."),
        parent=first,
    )
    return talk


def test_sft_is_the_whole_conversation() -> None:
    rows = reading.lines(export_items(SftExporter(), [two_turns().build_item()]))
    assert len(rows) == 1  # the title is nothing to learn
    messages = rows[0]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_calls"][0]["id"] == messages[3]["tool_call_id"]
    assert messages[4]["content"] == "There is a.txt."
    assert rows[0]["tools"][0]["function"]["name"] == "bash"


def test_sft_begins_anew_at_a_fork() -> None:
    talk = ConversationBuilder()
    first = talk.add_call([USER], make_text_parts("One."))
    history = [USER, {"role": "assistant", "content": "One."}]
    talk.add_call([*history, {"role": "user", "content": "Left?"}], make_text_parts("Left."), parent=first)
    talk.add_call([*history, {"role": "user", "content": "Right?"}], make_text_parts("Right."), parent=first)
    rows = reading.lines(export_items(SftExporter(), [talk.build_item()]))
    assert [row["messages"][-1]["content"] for row in rows] == ["Left.", "Right."]


def test_a_dead_attempt_does_not_split_a_conversation() -> None:
    talk = ConversationBuilder()
    first = talk.add_call([USER], make_text_parts("One."))
    history = [USER, {"role": "assistant", "content": "One."}, {"role": "user", "content": "More?"}]
    talk.add_call(history, make_text_parts("Tw"), parent=first, status="partial", delivered=0, role="retry")
    talk.add_call(history, make_text_parts("Two."), parent=first)
    rows = reading.lines(export_items(SftExporter(), [talk.build_item()]))
    assert [row["messages"][-1]["content"] for row in rows] == ["Two."]


def test_sft_reads_other_dialects() -> None:
    talk = ConversationBuilder(dialect="anthropic")
    fields = {"model": b'"m"', "max_tokens": b"10", "system": b'"Be brief."'}
    talk.add_call([USER], [Reasoning("Hm."), Text("No.")], fields=fields)
    messages = reading.lines(export_items(SftExporter(), [talk.build_item()]))[0]["messages"]
    assert messages[0]["role"] == "system"
    assert messages[-1] == {"role": "assistant", "content": "No.", "reasoning_content": "Hm."}


def test_sft_needs_no_tokens() -> None:
    """Engines that speak only text still give something to imitate."""
    talk = ConversationBuilder()
    talk.add_call(
        [USER], make_text_parts("None."), prompt_ids=None, sampled_ids=None, logprobs=None, untrainable="no_token_ids"
    )
    assert reading.lines(export_items(SftExporter(), [talk.build_item()]))[0]["messages"][-1]["content"] == "None."
    assert atif(talk).steps[-1].metrics is not None


def test_sft_of_the_roles_that_are_asked_for() -> None:
    item = two_turns().build_item()
    item.roles = frozenset(("auxiliary",))
    rows = reading.lines(export_items(SftExporter(), [item]))
    assert [row["messages"][-1]["content"] for row in rows] == ["Files"]


def test_a_bare_prompt_is_counted_not_lost() -> None:
    talk = ConversationBuilder(dialect="openai_completions")
    talk.add_call([], make_text_parts("b"), fields={"model": b'"m"', "prompt": b'"a"'})
    exporter = SftExporter()
    assert export_items(exporter, [talk.build_item()]) == b""
    assert dict(exporter.left_out) == {"call of the completions API": 1}
    trace = reading.lines(export_items(PolarExporter(), [talk.build_item()]))[0]["trajectory"]["traces"][0]
    assert trace["prompt_messages"] == []


def test_polar_splits_messages_where_the_trace_does() -> None:
    talk = ConversationBuilder()
    talk.add_call([USER], make_text_parts("One."))
    talk.add_call([SYSTEM, USER], make_text_parts("Two."))
    result = reading.lines(export_items(PolarExporter(), [talk.build_item(task_id="t")]))[0]
    one, two = result["trajectory"]["traces"]
    assert one["prompt_messages"] == [USER]
    assert one["response_messages"] == [{"role": "assistant", "content": "One."}]
    assert two["prompt_messages"] == [SYSTEM, USER]
    assert two["tools"][0]["function"]["name"] == "bash"
    assert (result["status"], result["task_id"], result["error"]) == ("COMPLETED", "t", None)
    assert result["metadata"]["timing"]["seconds"] == 60.0


@pytest.mark.parametrize(("reason", "status"), [("timeout", "TIMEOUT"), ("grader_crashed", "ERROR")])
def test_polar_says_why_there_is_no_reward(reason: str, status: str) -> None:
    result = reading.lines(export_items(PolarExporter(), [two_turns().build_item(None, reason)]))[0]
    assert (result["status"], result["error"]) == (status, reason)
    assert result["trajectory"]["metadata"]["reason"] == reason
    schemas.check("polar", msgspec.json.encode(result))


def test_nemo_gym_items_say_what_was_said() -> None:
    row = reading.lines(export_items(NemoGymExporter(), [two_turns().build_item()]))[0]
    kinds = [item["type"] for item in row["response"]["output"]]
    assert kinds == ["reasoning", "function_call"]
    assert row["response"]["output"][1]["generation_token_ids"] == [0, 1, 2]


# ATIF


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class AtifMetrics(Strict):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None


class AtifStep(Strict):
    step_id: int
    source: str
    message: str | list[dict[str, Any]]
    timestamp: str | None = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    observation: dict[str, Any] | None = None
    metrics: AtifMetrics | None = None
    extra: dict[str, Any] | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None


class AtifTrajectory(Strict):
    schema_version: str
    session_id: str
    trajectory_id: str
    agent: dict[str, Any]
    steps: list[AtifStep]
    final_metrics: dict[str, int]
    extra: dict[str, Any] | None = None
    subagent_trajectories: list["AtifTrajectory"] | None = None


def atif(talk: ConversationBuilder) -> AtifTrajectory:
    lines = export_items(AtifExporter(), [talk.build_item()]).splitlines()
    assert len(lines) == 1
    found = AtifTrajectory.model_validate_json(lines[0])
    for trajectory in (found, *(found.subagent_trajectories or ())):
        assert [step.step_id for step in trajectory.steps] == list(range(1, len(trajectory.steps) + 1))
        for step in trajectory.steps:
            if step.source != "agent":
                assert step.model_name is step.reasoning_content is step.tool_calls is step.metrics is None
    return found


def test_atif_is_steps_with_what_tools_answered() -> None:
    found = atif(two_turns())
    assert [step.source for step in found.steps] == ["system", "user", "agent", "agent"]
    called, answered = found.steps[2:]
    assert called.reasoning_content == "They want files."
    assert called.tool_calls is not None
    assert called.observation is not None
    assert called.tool_calls[0]["arguments"] == {"command": "ls"}
    assert called.observation["results"][0] == {
        "content": "a.txt",
        "source_call_id": called.tool_calls[0]["tool_call_id"],
    }
    assert answered.message == "There is a.txt."
    assert answered.metrics is not None
    assert answered.metrics.completion_token_ids == [20, 21, 22]
    assert found.subagent_trajectories is None
    assert found.extra is not None
    assert found.extra["reward"] == 1.0


def test_atif_keeps_token_ids_and_logprobs() -> None:
    talk = two_turns()
    steps = [step for step in atif(talk).steps if step.metrics is not None]
    main = [exchange for exchange in talk.exchanges if talk.roles[exchange.exchange_id] == "main"]
    for step, exchange in zip(steps, main, strict=True):
        assert step.metrics is not None
        assert exchange.prompt_ids is not None
        assert exchange.sampled_ids is not None
        assert exchange.logprobs is not None
        assert step.metrics.prompt_token_ids == exchange.prompt_ids.tolist()
        assert step.metrics.completion_token_ids == exchange.sampled_ids.tolist()
        assert step.metrics.logprobs == exchange.logprobs.tolist()


def test_atif_puts_other_agents_inside() -> None:
    talk = two_turns()
    talk.add_call([{"role": "user", "content": "You look for tests."}], make_text_parts("None."), role="subagent")
    found = atif(talk)
    assert found.subagent_trajectories is not None
    assert [one.agent["extra"]["role"] for one in found.subagent_trajectories] == ["subagent"]


def test_atif_marks_what_a_fork_repeats() -> None:
    talk = ConversationBuilder()
    first = talk.add_call([USER], make_text_parts("One."))
    history = [USER, {"role": "assistant", "content": "One."}]
    talk.add_call([*history, {"role": "user", "content": "Left?"}], make_text_parts("Left."), parent=first)
    talk.add_call([*history, {"role": "user", "content": "Right?"}], make_text_parts("Right."), parent=first)
    found = atif(talk)
    assert [step.message for step in found.steps] == ["List the files.", "One.", "Left?", "Left."]
    assert found.subagent_trajectories is not None
    fork = found.subagent_trajectories[0].steps
    assert [(step.message, step.is_copied_context) for step in fork] == [
        ("List the files.", True),
        ("One.", True),
        ("Right?", None),
        ("Right.", None),
    ]


def test_atif_of_pictures_and_odd_arguments() -> None:
    talk = ConversationBuilder()
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    talk.add_call([{"role": "user", "content": [picture, sound]}], [ToolCall("c", "bash", "not json")])
    shown, called = atif(talk).steps
    assert shown.message == [
        {"type": "image", "source": {"media_type": "image/png", "path": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "[audio]"},
    ]
    assert called.tool_calls is not None
    assert called.tool_calls[0]["arguments"] == {"input": "not json"}


def test_a_session_without_an_answer_is_counted() -> None:
    talk = ConversationBuilder()
    talk.add_call([USER], [], status="failed", reply=None)
    for make in (AtifExporter, SftExporter):
        exporter = make()
        assert export_items(exporter, [talk.build_item()]) == b""
        assert exporter.left_out.total() == 1
