"""Templates made up to be difficult: each prompt goes on from recorded ids with a proof, or branches with a reason, and
never has another context than the template writes for the request."""

import re
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.rendering import template
from polar.rendering.continuation import ContinuationMode
from polar.rendering.model_codec import ModelCodec
from polar.rendering.template import TemplateError
from polar.types import Message, Text
from tests.unit.rendering.dialogue import Dialogue, Prompt, results, system, user
from tests.unit.rendering.echoes import CHANGED, SAME
from tests.unit.rendering.families.models import small
from tests.unit.rendering.hostile import HOSTILE, hostile
from tests.unit.rendering.talkers import Says, write_scripted

every_template = pytest.mark.parametrize("name", HOSTILE)


@cache
def _model(name: str, mode: ContinuationMode) -> ModelCodec:
    return ModelCodec(hostile(name), mode)


def dialogue(name: str, mode: ContinuationMode = "auto") -> Dialogue:
    return Dialogue(_model(name, mode), _model(name, "off"))


def check(talk: Dialogue, prompt: Prompt) -> None:
    """The recorded prefix is the recorded one, and the context is what the template writes for this request now."""
    talk.check(prompt, literal=False)
    decoded, whole = talk.decode(prompt.ids), talk.whole(prompt.request)
    assert _contexts(decoded) == _contexts(whole)
    if prompt.plan.base is None:
        assert decoded == whole


_TURN = re.compile(r"(<\|im_start\|>assistant[^\n]*\n).*?(?=<\|im_end\|>|<\|im_start\|>|<\|endoftext\|>|$)", re.DOTALL)
_ENDS = re.compile(r"(\s|<\|im_end\|>|<\|endoftext\|>)+")
_MESSAGE = re.compile(r"ctx\w+")


def _contexts(text: str) -> tuple[str, list[str]]:
    """The text without the model's turns and without how they end; and the words of messages, wherever they stand."""
    return _ENDS.sub(" ", _TURN.sub(r"\1", text)), _MESSAGE.findall(text)


@every_template
def test_behind_a_result_and_behind_a_question(name: str) -> None:
    talk = dialogue(name)
    history, reasons = [system("ctx one"), user("ctxtwo")], []
    for says in (Says("Why?", "Look.", [("bash", {"text": "ls"})]), Says("Hm.", "Fine."), Says()):
        prompt = talk.ask(history)
        check(talk, prompt)
        reasons.append(prompt.plan.reason)
        turn = talk.reply(prompt, write_scripted(says))
        history += [turn, *(results(turn, "ctxthree") or [user("ctxfour")])]
    assert reasons == [None, HOSTILE[name].result, HOSTILE[name].question]


words = st.sampled_from(["", "A", "b c", "Long " * 50, "<b>&amp;"])
turns = st.builds(
    Says, words, words, st.lists(st.tuples(st.just("bash"), st.fixed_dictionaries({"text": words})), max_size=2)
)
follow = st.sampled_from(["", "", "question", "system", "turn", "fork"])


@pytest.mark.parametrize("mode", ["auto", "sampled"])
@every_template
@settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(turns, st.sampled_from([*SAME, *CHANGED]), follow), min_size=2, max_size=5))
def test_no_prompt_has_another_context_than_its_request(
    name: str, mode: ContinuationMode, steps: list[tuple[Says, str, str]]
) -> None:
    talk = dialogue(name, mode)
    history = [system("ctxsystem"), user("ctxuser")]
    for number, (says, echo, event) in enumerate(steps):
        if not talk.model.traits.supports_parallel_calls:
            says = says._replace(calls=says.calls[:1])
        try:
            prompt = talk.ask(history)
        except TemplateError:
            with pytest.raises(TemplateError):
                dialogue(name, "off").ask(history)
            return
        check(talk, prompt)
        turn = (SAME | CHANGED)[echo](talk.reply(prompt, write_scripted(says)))
        history += [turn, *(results(turn, f"ctxresult{number}") or [user(f"ctxnext{number}")])]
        match event:
            case "question":
                history.append(user(f"ctxquestion{number}"))
            case "system":
                history.append(system(f"ctxreminder{number}"))
            case "turn":
                history += [Message("assistant", [Text("Ok.")]), user(f"ctxafter{number}")]
            case "fork" if len(history) > 4:
                history = [*history[:2], user("ctxfork")]


def test_parallel_calls_that_a_template_refuses() -> None:
    """Rendered, each call is a turn with its result behind it; continued, the turn is what it was, and the results
    follow it."""
    talk = dialogue("refuses parallel calls")
    written = write_scripted(Says("", "", [("bash", {"text": "one"}), ("bash", {"text": "two"})]))
    turn = talk.reply(talk.ask([user("Hi")]), written)
    prompt = talk.ask([user("Hi"), turn, *results(turn, "ctx")])
    assert prompt.plan.reason is None
    assert talk.decode(prompt.ids).endswith(
        f"{written}\n<|im_start|>tool\nctx 0<|im_end|>\n<|im_start|>tool\nctx 1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert re.findall("one|two|ctx .", talk.whole(prompt.request)) == ["one", "ctx 0", "two", "ctx 1"]


@pytest.mark.parametrize("name", ["date", "date in the header", "date before the turn"])
def test_a_date_that_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the templates is set, and the model read anew, so that no day is remembered."""
    for days in (("Monday", "Tuesday"), ("Monday", "Monday")):
        for restarted in (False, True):
            talk = Dialogue(ModelCodec(hostile(name)), _model(name, "off"))
            _set_clock(talk, days[0], monkeypatch)
            turn = talk.reply(talk.ask([user("Hi")]), write_scripted(Says("", "Yes.")))
            if restarted:
                talk.model = ModelCodec(hostile(name))
            _set_clock(talk, days[1], monkeypatch)
            prompt = talk.ask([user("Hi"), turn, user("And?")])
            check(talk, prompt)
            assert prompt.plan.reason == (None if days[0] == days[1] else "context_changed")


def _set_clock(talk: Dialogue, day: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = template._compile(talk.model.tokenizer.template.select_source())
    monkeypatch.setitem(compiled.globals, "strftime_now", lambda _: day)


_OPENERS = """
{%- for tool in tools or [] %}{{ '<|system|>\\n' + tool | tojson }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|assistant|>\\n<think>' + (message.reasoning_content or '') + '</think>\\n' }}
{%- else %}{{ ('<|observation|>' if message.role == 'tool' else '<|' + message.role + '|>') + '\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + value + '</arg_value>\\n' }}
{%- endfor %}{{ '</tool_call>' }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n<think>' }}{% endif %}
"""


def test_an_opener_that_ends_the_turn_is_not_doubled() -> None:
    """As GLM's models do: they end a turn by opening the next message. Where it is of another role, both are there."""
    tokens = "<|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> </tool_call> <arg_key>"
    tokenizer = small([*tokens.split(), "</arg_key>", "<arg_value>", "</arg_value>"], _OPENERS, "<|endoftext|>")
    model, whole = ModelCodec(tokenizer), ModelCodec(tokenizer, "off")
    assert model.family.name == "glm"
    call = "Hm.</think>\n\n<tool_call>bash\n<arg_key>text</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>"
    for written, ended in ((f"{call}<|observation|>", True), (call, True), (f"{call}<|user|>", False)):
        talk = Dialogue(model, whole)
        turn = talk.reply(talk.ask([user("Hi")]), tokenizer.encode(written))
        prompt = talk.ask([user("Hi"), turn, *results(turn)])
        talk.check(prompt, literal=ended)
        assert prompt.plan.reason is None
        assert ("<|user|><|observation|>" in talk.decode(prompt.ids)) != ended
