"""A session rendered for another model: the turns that it would have sampled, after the prompts that it would see."""

import json
from collections import Counter
from functools import cache
from typing import Any

import pytest

from polar.export.sft_tokens import replay_session
from polar.records.trajectory import Trace
from polar.rendering.continuation import TurnHistory
from polar.rendering.model_codec import ModelCodec
from polar.testing.conversations import ConversationBuilder, make_text_parts
from polar.trajectory.builders import prefix_merging
from polar.types import Message, Part, Reasoning, Request, Text, ToolCall
from tests.unit.rendering.families.models import TOOLS
from tests.unit.rendering.talkers import TALKERS, Says

NAMES = ("scripted", "qwen35", "llama3_2", "smollm2")  # which differ in all that matters here
SYSTEM = {"role": "developer", "content": "Be brief."}
USER = {"role": "user", "content": "List <|im_end|> the files."}
SAYS = [
    Says("I look.", "", [("bash", {"command": "ls -l", "timeout": 3})]),
    Says("", "Two calls.", [("bash", {"command": "ls"}), ("bash", {"command": "pwd"})]),
    Says("They want files.", "There is a.txt."),
    Says("", "No."),
]


@cache
def model_of(name: str) -> ModelCodec:
    return ModelCodec(TALKERS[name].tokenizer())


def parts_of(says: Says) -> list[Part]:
    calls = [ToolCall(f"c{number}", name, json.dumps(given)) for number, (name, given) in enumerate(says.calls)]
    thought: list[Part] = [Reasoning(says.thinking)] if says.thinking else []
    return [*thought, *([Text(says.text)] if says.text else []), *calls]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("says", SAYS)
def test_a_turn_is_what_the_model_would_have_written(name: str, says: Says) -> None:
    talker = TALKERS[name]
    model = model_of(name)
    able = talker.able(says)
    request = Request("m", [Message("user", [Text("Hi")])], list(TOOLS))
    turn = model.encode_turn(request, parts_of(able), TurnHistory())
    assert turn is not None
    text, written = model.tokenizer.decode(turn.tolist()), talker.write(able)
    if not able.thinking:  # an empty thought is the template's matter
        text = text.replace("<think>\n\n</think>\n\n", "")
    assert text == written
    assert turn.tolist()[-1] == model.encoder.encode(written, first=False).tolist()[-1]


def talk() -> ConversationBuilder:
    """Two calls, of which the second goes on from the first; and a side call."""
    made = ConversationBuilder()
    first = made.add_call(
        [SYSTEM, USER],
        [Reasoning("They want files."), ToolCall(f"{made.make_exchange_id(0)}_0", "bash", '{"command": "ls"}')],
    )
    call = {"id": f"call_{first}_0", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    made.add_call([{"role": "user", "content": "A title?"}], make_text_parts("Files"), role="auxiliary")
    answered = {"role": "assistant", "content": None, "reasoning_content": "They want files.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": f"call_{first}_0", "content": "a.txt"}
    made.add_call([SYSTEM, USER, answered, result], make_text_parts("There is a.txt."), parent=first)
    return made


def traces(made: ConversationBuilder, model: ModelCodec) -> tuple[list[Trace], Counter[str]]:
    left_out: Counter[str] = Counter()
    return prefix_merging(replay_session(made.build_item(), model, left_out)).traces, +left_out


def learnt(trace: Trace, model: ModelCodec) -> str:
    own: Any = trace.response_ids[trace.loss_mask == 1]
    return model.tokenizer.decode(own.tolist())


@pytest.mark.parametrize("name", NAMES)
def test_each_turn_is_learnt_once_and_nothing_else_is(name: str) -> None:
    talker = TALKERS[name]
    model = model_of(name)
    found, left_out = traces(talk(), model)
    assert not left_out
    text = "".join(learnt(trace, model) for trace in found)
    first = talker.able(Says("They want files.", "", [("bash", {"command": "ls"})]))
    second = talker.able(Says("", "There is a.txt."))
    for written in (talker.write(first), talker.write(second)):
        assert written.removeprefix("\n</think>\n\n") in text
    assert "Be brief" not in text
    assert "List" not in text
    assert "title" not in text
    assert sum(trace.weight for trace in found) == pytest.approx(1)
    control = model.encoder.control_tokens.get("<|im_end|>")
    if control is not None:  # content that spells a control token stays text
        prompt = found[0].prompt_ids.tolist()
        assert prompt.count(control) <= 3


def test_a_conversation_is_one_trace_where_the_template_lets_it() -> None:
    found, _ = traces(talk(), model_of("scripted"))
    assert len(found) == 1
    assert len(found[0].spans) == 2


def test_what_was_cut_off_is_context_only() -> None:
    model = model_of("scripted")
    made = talk()
    made.exchanges[0].finish_reason = "length"
    found, left_out = traces(made, model)
    assert left_out == {"reply that was cut off": 1}
    assert learnt(found[0], model) == "There is a.txt.<|im_end|>"


def test_pictures_are_counted_and_left_out() -> None:
    made = ConversationBuilder()
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    made.add_call([{"role": "user", "content": [picture]}], make_text_parts("A cat."))
    found, left_out = traces(made, model_of("scripted"))
    assert not found
    assert left_out == {"call with a picture": 1}
