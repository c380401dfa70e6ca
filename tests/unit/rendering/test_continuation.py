"""Continuation, template by template: what goes on from recorded ids, what branches and why, and that no prompt ever
has another context than its request.

|             | goes on behind                        | branches                                                      |
|-------------|---------------------------------------|---------------------------------------------------------------|
| scripted    | every turn                            |                                                               |
| Qwen3, 3.5  | tool results                          | a new question: the template drops earlier thinking           |
| Qwen2.5     | every turn                            | turns with thinking: the template shows none                  |
| Llama 3.2   | every turn of text or of one call     | text beside a call, which it doesn't show; a new day          |
| Gemma 3     | every turn (tools spelled out)        |                                                               |
| DeepSeek V3 | every turn (tools spelled out)        |                                                               |
| SmolLM2     | every turn (tools spelled out)        |                                                               |
"""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.rendering.continuation import ContinuationMode
from polar.rendering.model_codec import ModelCodec
from polar.rendering.tokenizer import Tokenizer
from polar.rendering.turn_digest import digest_turn
from polar.types import Message, Reasoning, Request, Text, Tool, ToolCall
from tests.unit.rendering.dialogue import Dialogue, results, system, user
from tests.unit.rendering.echoes import CHANGED, SAME
from tests.unit.rendering.families.models import TOOLS
from tests.unit.rendering.talkers import TALKERS, Says, Talker

EVERYTHING = Says("Why not?", "I look.", [("bash", {"text": "ls", "rate": 1.0}), ("read_file", {"text": "é <b>"})])
ANSWER = Says("", "Done.")


@cache
def _model(name: str, mode: ContinuationMode) -> ModelCodec:
    return ModelCodec(TALKERS[name].tokenizer(), mode)


def dialogue(name: str, mode: ContinuationMode = "auto") -> Dialogue:
    return Dialogue(_model(name, mode), _model(name, "off"))


def said(says: Says) -> list[Any]:
    thinking = [Reasoning(says.thinking)] if says.thinking else []
    text = [Text(says.text)] if says.text else []
    return [*thinking, *text, *(ToolCall("", name, json.dumps(arguments)) for name, arguments in says.calls)]


every_talker = pytest.mark.parametrize("name", TALKERS)


@every_talker
@pytest.mark.parametrize("echo", SAME)
def test_a_turn_that_comes_back_whole_is_continued(name: str, echo: str) -> None:
    talker, talk = TALKERS[name], dialogue(name)
    history = [system("Be brief."), user("Hi")]
    for says in (EVERYTHING, Says("", "", [("bash", {})]), Says("Hm.", "", [("bash", {"count": 1})])):
        says = talker.able(says)
        prompt = talk.ask(history)
        talk.check(prompt)
        assert prompt.plan.reason is None
        turn = talk.reply(prompt, talker.write(says))
        assert digest_turn(turn.parts) == digest_turn(said(says))
        turn = SAME[echo](turn)
        history += [turn, *(results(turn) or [user("And?")])]
    prompt = talk.ask(history)
    talk.check(prompt)
    assert talk.continues(prompt)


@every_talker
@pytest.mark.parametrize("reason", CHANGED)
def test_a_turn_that_was_changed_branches_with_its_reason(name: str, reason: str) -> None:
    talker, talk = TALKERS[name], dialogue(name)
    history = [user("Hi")]
    first = talk.reply(talk.ask(history), talker.write(talker.able(EVERYTHING)))
    turn = CHANGED[reason](first)
    history += [turn, *(results(turn) or [user("And?")])]
    prompt = talk.ask(history)
    talk.check(prompt)
    if turn == first:
        assert prompt.plan.reason is None
    else:
        assert prompt.plan.reason == reason
        assert talk.decode(prompt.ids) == talk.whole(prompt.request)
        # The next turn goes on from what is there now.
        history.append(talk.reply(prompt, talker.write(talker.able(Says("", "", [("bash", {})])))))
        prompt = talk.ask([*history, *results(history[-1])])
        talk.check(prompt)
        assert prompt.plan.reason is None


@every_talker
def test_a_new_question(name: str) -> None:
    """Where the template drops earlier thinking then, that is the reason; the prompt before it is still shared."""
    talker, talk = TALKERS[name], dialogue(name)
    says = talker.able(Says("Why?", "Because."))
    history = [user("Hi"), talk.reply(talk.ask([user("Hi")]), talker.write(says)), user("And?")]
    prompt = talk.ask(history)
    talk.check(prompt)
    assert prompt.plan.reason == (None if talker.keeps_thinking else "thinking_dropped_by_template")
    assert prompt.plan.base is not None
    assert dialogue(name, "off").ask(history).plan.base is None


@every_talker
def test_sampled_keeps_what_was_said_whatever_comes_back(name: str) -> None:
    talker, talk = TALKERS[name], dialogue(name, "sampled")
    history = [system("Be brief."), user("Hi")]
    for change in (CHANGED["thinking_dropped_by_harness"], CHANGED["text_changed"], CHANGED["calls_changed"]):
        prompt = talk.ask(history)
        assert prompt.plan.reason is None
        turn = change(talk.reply(prompt, talker.write(talker.able(EVERYTHING))))
        history += [turn, *results(turn), user("And?")]
    prompt = talk.ask(history)
    assert talk.continues(prompt)
    assert [digest_turn(turn.parts) for turn in prompt.claim if turn.role == "assistant"] == [
        digest_turn(said(talker.able(EVERYTHING)))
    ] * 3


@every_talker
def test_off_encodes_the_whole_rendering(name: str) -> None:
    talker, talk = TALKERS[name], dialogue(name, "off")
    history = [user("Hi")]
    turn = talk.reply(talk.ask(history), talker.write(talker.able(EVERYTHING)))
    prompt = talk.ask([*history, turn, *(results(turn) or [user("And?")])])
    assert prompt.plan.reason == "continuation_off"
    assert prompt.ids == talk.model.tokenizer.encode(talk.whole(prompt.request))


def start(name: str = "qwen3") -> tuple[Talker, Dialogue, list[Message]]:
    """A session of two turns, and a question."""
    talker, talk = TALKERS[name], dialogue(name)
    history = [system("It is Monday."), user("Hi")]
    for says in (Says("", "One."), Says("", "Two.")):
        history += [talk.reply(talk.ask(history), talker.write(talker.able(says))), user("And?")]
    return talker, talk, history


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda history: [system("It is Tuesday."), *history[1:]], "context_changed"),
        (lambda history: [*history[:3], user("Other?"), *history[4:]], "context_changed"),
        (lambda history: [*history[:3], user("Wait."), *history[3:]], "context_changed"),
        (lambda history: [history[0], *history[3:]], "context_changed"),
        (lambda history: [*history[:4], Message("assistant", [Text("Three.")]), history[5]], "unknown_turn"),
        (lambda history: [*history[:2], Message("assistant", [Text("Three.")]), *history[3:]], "unknown_turn"),
        (lambda history: [*history[:2], *history[4:]], "context_changed"),
    ],
    ids=["date", "earlier message", "inserted", "cleared", "rewritten turn", "rewritten earlier turn", "left out"],
)
@every_talker
def test_a_changed_history(name: str, change: Any, reason: str) -> None:
    _, talk, history = start(name)
    prompt = talk.ask(change(history))
    talk.check(prompt)
    assert prompt.plan.reason == reason


@every_talker
@pytest.mark.parametrize("text", ["5", ""])
def test_a_turn_that_is_left_out_before_an_equal_one(name: str, text: str) -> None:
    """The message behind it stands between the recorded prompt of the one and the place of the other."""
    talker, talk = TALKERS[name], dialogue(name)
    history = [system("Be brief."), user("Hi")]
    for asked in (text, "And?"):
        history += [talk.reply(talk.ask(history), talker.write(talker.able(Says("", "Well.")))), user(asked)]
    del history[2]
    prompt = talk.ask(history)
    talk.check(prompt)
    assert talk.decode(prompt.ids) == talk.whole(prompt.request)


@every_talker
def test_a_message_that_was_added_to_is_encoded_as_a_whole(name: str) -> None:
    """Also where the template writes no token behind it, so that the recorded context is the beginning of this one."""
    talker, talk = TALKERS[name], dialogue(name)
    turn = talk.reply(talk.ask([user("Hel")]), talker.write(talker.able(Says("", "Well."))))
    prompt = talk.ask([user("Hello"), turn, user("And?")])
    talk.check(prompt)
    assert prompt.plan.reason == "context_changed"
    assert prompt.ids == talk.model.tokenizer.encode(talk.whole(prompt.request))


def test_an_earlier_turn_that_was_edited_is_told_from_the_last_one() -> None:
    """The recorded ids up to the edit are kept."""
    talker, talk = TALKERS["scripted"], dialogue("scripted")
    history = [user("Hi")]
    for number in range(3):
        prompt = talk.ask(history)
        turn = talk.reply(prompt, talker.write(Says("", f"{number}", [("bash", {"count": number})])))
        history += [turn, *results(turn)]
    history[3] = CHANGED["calls_changed"](history[3])
    prompt = talk.ask(history)
    talk.check(prompt)
    assert prompt.plan.reason == "calls_changed"
    base = prompt.plan.base
    assert base is not None
    assert base.sampled_tokens is None
    assert base.turn.seq == 2


def test_other_tools() -> None:
    _, talk, history = start()
    prompt = talk.ask(history, TOOLS[:1])
    talk.check(prompt)
    assert prompt.plan.reason == "context_changed"
    prompt = talk.ask(history, [Tool("other"), *TOOLS])
    talk.check(prompt)
    assert prompt.plan.reason == "context_changed"


@every_talker
def test_thinking_that_is_switched_off_and_on(name: str) -> None:
    """An empty think block that only the generation prompt has is context, and stays."""
    talker, talk = TALKERS[name], dialogue(name)
    history = [user("Hi")]
    for enabled in (False, True, None, False):
        prompt = talk.ask(history, thinking=enabled)
        assert talk.whole(prompt.request).endswith(talk.decode(prompt.ids[-3:]))
        assert prompt.plan.reason is None
        before = prompt.ids
        written = talker.write(talker.able(Says("", "Well.", [("bash", {})])))
        if enabled is False:
            written = written.removeprefix("\n</think>\n\n")  # the prompt has it
        turn = talk.reply(prompt, written)
        history += [turn, *(results(turn) or [user("And?")])]
        prompt = talk.ask(history, thinking=enabled)
        assert prompt.ids[: len(before)] == before


def test_forks_and_subagents_find_their_parents() -> None:
    talker, talk, history = start()
    fork = talk.ask([*history[:3], user("Other?")])
    talk.check(fork)
    assert fork.plan.reason is None
    assert fork.plan.base is not None
    assert fork.plan.base.turn.seq == 1
    inner = [system("You are a helper."), user("Do it.")]
    inner += [talk.reply(talk.ask(inner), talker.write(Says("", "One."))), user("More?")]  # says what the parent said
    prompt = talk.ask(inner)
    talk.check(prompt)
    assert prompt.plan.base is not None
    assert prompt.plan.base.turn.seq == 3
    prompt = talk.ask(history)
    talk.check(prompt)
    assert prompt.plan.base is not None
    assert prompt.plan.base.turn.seq == 2


@pytest.mark.parametrize("mode", ["auto", "sampled"])
def test_equal_turns_are_told_apart_by_where_they_stand(mode: ContinuationMode) -> None:
    talker, talk = TALKERS["scripted"], dialogue("scripted", mode)
    history = [system("Monday"), user("Hi")]
    for _ in range(3):
        prompt = talk.ask(history)
        talk.check(prompt)
        assert prompt.plan.reason is None
        history += [talk.reply(prompt, talker.write(Says("", "Well."))), user("And?")]
    del history[2:4]
    prompt = talk.ask(history)
    talk.check(prompt)
    assert talk.continues(prompt)
    assert prompt.plan.base is not None
    assert prompt.plan.base.turn.seq == 2
    prompt = talk.ask([system("Tuesday"), *history[1:]])
    talk.check(prompt)
    assert prompt.plan.reason == "context_changed"
    assert prompt.plan.base is None


def test_an_equal_turn_elsewhere_is_no_parent() -> None:
    """The context of one is the beginning of the other's, and the other's own exchange had another."""
    talker, talk = TALKERS["scripted"], dialogue("scripted", "sampled")
    history = [system("Monday"), user("Hi")]
    for day in ("Monday", "Monday", "Tuesday"):
        history[0] = system(day)
        history += [talk.reply(talk.ask(history), talker.write(Says("", "Well."))), user("And?")]
    prompt = talk.ask([system("Monday"), *history[1:]])
    talk.check(prompt, literal=False)
    assert prompt.plan.reason == "context_changed"


def test_of_equal_turns_the_latest_delivered_one_counts() -> None:
    talker, talk = TALKERS["scripted"], dialogue("scripted")
    for _ in range(2):
        turn = talk.reply(talk.ask([user("Hi")]), talker.write(Says("", "Yes.")))
    talk.reply(talk.ask([user("Hi")]), talker.write(Says("", "Yes.")), delivered=0)
    prompt = talk.ask([user("Hi"), turn, user("And?")], list(TOOLS))
    talk.check(prompt)
    assert prompt.plan.base is not None
    assert prompt.plan.base.turn.seq == 2


@every_talker
def test_a_turn_that_was_cut(name: str) -> None:
    """Of a reply that broke off, the harness keeps what it got: those tokens, and the end token as context."""
    talker, talk = TALKERS[name], dialogue(name)
    written = talker.write(talker.able(Says("", "one two three four five six")))
    prompt = talk.ask([user("Hi")])
    sampled = talk.sample(written)
    cut = len(sampled) - 3
    turn = talk.reply(prompt, sampled, delivered=cut)
    after = talk.ask([user("Hi"), turn, user("Go on.")])
    talk.check(after, literal=False)
    base = after.plan.base
    assert after.plan.reason is None
    assert base is not None
    assert base.sampled_tokens is not None
    assert base.sampled_tokens <= cut
    end = talk.model.encoder.encode(written)[-1]
    assert after.ids[base.turn.prompt_tokens + base.sampled_tokens] == end
    changed = Message("assistant", [*turn.parts, Text("and more")])
    assert talk.ask([user("Hi"), changed, user("Go on.")]).plan.reason == "unknown_turn"


@every_talker
def test_a_turn_that_ends_otherwise_gets_the_end_token_as_context(name: str) -> None:
    talker, talk = TALKERS[name], dialogue(name)
    sampled = talk.model.encoder.encode(talker.write(talker.able(Says("", "Too long"))), first=False).tolist()
    turn = talk.reply(talk.ask([user("Hi")]), sampled[:-1])
    prompt = talk.ask([user("Hi"), turn, user("And?")], list(TOOLS))
    talk.check(prompt)
    assert prompt.plan.reason is None


@every_talker
@pytest.mark.parametrize(
    "messages",
    [
        [user("Hi"), Message("assistant", []), user("And?")],
        [user("Hi"), Message("assistant", [Text("a")]), Message("assistant", [Text("b")]), user("And?")],
        [user("Hi"), Message("assistant", [Text("Once upon")])],
        [user(""), Message("assistant", [Text(" \n")]), user(" ")],
        [user("Hi\x00\ud800"), Message("assistant", [Text("\x01\udc00")]), user("And?")],
        [user("Hi"), user("there"), system("Now."), user("?")],
        [system("One."), Message("developer", [Text("Two.")]), user("Hi")],
    ],
    ids=["empty turn", "two turns", "prefill", "white space", "odd characters", "roles", "two systems"],
)
def test_odd_histories_render(name: str, messages: list[Message]) -> None:
    talk = dialogue(name)
    prompt = talk.ask(messages)
    expected = talk.whole(prompt.request).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert talk.decode(prompt.ids) == expected
    assert not any(turn.role == "assistant" for turn in messages) or prompt.plan.reason is not None


@pytest.mark.parametrize("name", [name for name in TALKERS if name != "gemma3"])  # which wants roles to alternate
def test_a_request_that_ends_with_a_turn_goes_on_behind_it(name: str) -> None:
    talker, talk = TALKERS[name], dialogue(name)
    turn = talk.reply(talk.ask([user("Hi")]), talker.write(talker.able(Says("", "Yes."))))
    prompt = talk.ask([user("Hi"), turn])
    talk.check(prompt)
    assert prompt.plan.reason is None
    more = talk.reply(prompt, talker.write(talker.able(Says("", "Yes, yes."))))
    prompt = talk.ask([user("Hi"), turn, more, user("And?")])
    talk.check(prompt)


@every_talker
def test_an_empty_reply_does_not_end_continuation(name: str) -> None:
    talker, talk = TALKERS[name], dialogue(name)
    history = [user("Hi")]
    end = talk.model.encoder.encode(talker.write(talker.able(ANSWER)))[-1:].tolist()
    for written in (end, talker.write(talker.able(ANSWER)), talker.write(talker.able(ANSWER))):
        prompt = talk.ask(history)
        history += [talk.reply(prompt, written), user("And?")]
    prompt = talk.ask(history)
    assert prompt.plan.reason is None


# Any conversation

words = st.text(st.sampled_from("ab é🙂\n{}<>/|\"'\\5"), max_size=12).map(str.strip)
arguments = st.fixed_dictionaries({}, optional={"text": words, "rate": st.sampled_from([1.0, 0.5, 2]), "maybe": words})
turns = st.builds(
    Says, words, words, st.lists(st.tuples(st.sampled_from(["bash", "read_file"]), arguments), max_size=2)
)
echoes = st.sampled_from([*SAME, *CHANGED])
events = st.sampled_from(["", "", "", "", "question", "fork", "compact", "date", "tools", "leave out", "add"])


@pytest.mark.parametrize("mode", ["auto", "sampled"])
@every_talker
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(turns, echoes, words, events), min_size=1, max_size=6))
def test_no_prompt_has_another_context_than_its_request(
    name: str, mode: ContinuationMode, steps: list[tuple[Says, str, str, str]]
) -> None:
    talker, talk = TALKERS[name], dialogue(name, mode)
    history, tools = [system("Be brief."), user("Hi")], list(TOOLS)
    clean = True  # nothing happened that could be a reason for a branch
    for says, echo, text, event in steps:
        says = talker.able(says)
        prompt = talk.ask(history, tools)
        talk.check(prompt, literal=mode == "auto")
        if clean:
            assert prompt.plan.reason is None
        turn = talk.reply(prompt, talker.write(says))
        if digest_turn(turn.parts) != digest_turn(said(says)):
            return  # what it wrote can be read in another way: then the template writes it in another way too
        echoed = (SAME | CHANGED)[echo](turn)
        shown = talker.keeps_thinking or any(isinstance(part, ToolCall) for part in echoed.parts)
        clean = digest_turn(echoed.parts) == digest_turn(turn.parts) and shown and event == ""
        history += [echoed, *(results(echoed, text) or [user(text)])]
        match event:
            case "question":
                history.append(user(text + "?"))
            case "fork":
                history = history[: 2 + len(history) // 2]
                history = history if history[-1].role != "assistant" else history[:-1]
            case "compact":
                history = [history[0], user(f"So far: {text}")]
            case "date":
                history[0] = system(f"Be brief. {text}")
            case "tools":
                tools = tools[::-1]
            case "add":
                asked = [part.text for part in history[1].parts if isinstance(part, Text)]
                history[1] = user("".join(asked) + text)
            case "leave out":
                del history[2 : 2 + 1 + len(results(history[2]))]


def test_ids_of_another_tokenizer_are_not_continued() -> None:
    """A gateway may be started again with another model whose template writes the same text."""
    talk = dialogue("scripted", "auto")
    asked = talk.ask([system("Be brief."), user("Hi")])
    turn = talk.reply(asked, TALKERS["scripted"].write(Says("", "Well.", [])))
    request = Request("m", [system("Be brief."), user("Hi"), turn, user("And?")], list(TOOLS))
    assert talk.model.plan_prompt(request, talk.history, lambda *_: None).base is not None
    other = Tokenizer.load(TOKENIZER_FOLDER)
    other.backend.add_tokens(["another"])
    plan = ModelCodec(other).plan_prompt(request, talk.history, lambda *_: None)
    assert (plan.base, plan.reason) == (None, "context_changed")
