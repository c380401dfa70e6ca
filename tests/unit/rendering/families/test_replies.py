"""What each family reads from replies written by hand."""

import json
from typing import Any

import pytest

from polar.rendering.families import detect_family
from polar.types import ReasoningDelta, ReplyEvent, TextDelta, ToolCallDelta, ToolCallStart
from tests.unit.rendering.families.models import FAMILY, TOOLS, model, parse


def text(value: str) -> list[ReplyEvent]:
    return [TextDelta(value)]


def thought(value: str) -> list[ReplyEvent]:
    return [ReasoningDelta(value)]


def call(arguments: str = '{"text":  "ls"}', name: str = "bash", written: str | None = None) -> list[ReplyEvent]:
    return [ToolCallStart("", name, written=written), ToolCallDelta(arguments)]


ONE = '{"text":  "ls"}'  # spelled as no serialiser would
HERMES = f'<tool_call>\n{{"name": "bash", "arguments": {ONE}}}\n</tool_call>'
KIMI_CALL = call(written="functions.bash:0")
KIMI = f"<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{ONE}<|tool_call_end|>"
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{ONE}\n```<｜tool▁call▁end｜>"
CODER = "<tool_call>\n<function=bash>\n<parameter=text>\nls\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>bash\n<arg_key>text</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>"
HARMONY = f"<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{ONE}"

WELL_FORMED: list[tuple[str, str, str, list[ReplyEvent]]] = [
    # Hermes
    ("scripted", "", "Hi.<|im_end|>", text("Hi.")),
    ("scripted", "", "<think>\nHm.\n</think>\n\nHi.\n", thought("Hm.") + text("Hi.\n")),
    ("scripted", "<think>\n", "\nHm.\n</think>\n\nHi.", thought("Hm.") + text("Hi.")),
    ("scripted", "<think>\n\n</think>\n\n", "\nHi.", text("Hi.")),
    ("scripted", "", "<think>never closed\n<tool_call>", thought("never closed\n<tool_call>")),
    ("scripted", "", f"<think>Hm. {HERMES} </think>Hi.", thought(f"Hm. {HERMES}") + text("Hi.")),
    ("scripted", "", f"<think>Hm.\n{HERMES}\n{HERMES}<|im_end|>", thought("Hm.") + call() * 2),
    ("hermes_as_text", "", f"<think>Hm. {HERMES}", thought(f"Hm. {HERMES}")),
    ("scripted", "", f"\n\n{HERMES}\n{HERMES}\n", call() + call()),
    (
        "scripted",
        "",
        f"One.\n{HERMES}\n\nTwo.{HERMES} Three.",
        text("One.") + call() + text("Two.") + call() + text("Three."),
    ),
    ("scripted", "", "A stray </think> and </tool_call>.", text("A stray </think> and </tool_call>.")),
    ("scripted", "", "<|im_start|>x", text("<|im_start|>x")),
    ("scripted", "", "  Indented.", text("  Indented.")),
    ("scripted", "", " \n", []),
    ("scripted", "", "a<think>b</think>c", text("a") + thought("b") + text("c")),
    (
        "scripted",
        "",
        '<tool_call>{"name": "bash", "arguments": {"text": "echo </tool_call> \\" <tool_call>"}}</tool_call>',
        call('{"text": "echo </tool_call> \\" <tool_call>"}'),
    ),
    (
        "scripted",
        "",
        '<tool_call>{"arguments": [1 , 2], "id": 7, "name": "unknown"}</tool_call>',
        call("[1 , 2]", "unknown"),
    ),
    ("hermes_as_text", "", f"<think>\nHm.</think>Hi.{HERMES}<|im_end|>", thought("Hm.") + text("Hi.") + call()),
    ("hermes_as_text", "", "The tag <think> opens.", text("The tag <think> opens.")),
    ("hermes_as_text", "", "a < b <tool <tool_", text("a < b <tool <tool_")),
    # Qwen3-Coder
    ("qwen_coder", "", f"So:\n{CODER}\n{CODER}<|im_end|>", text("So:") + call('{"text": "ls"}') * 2),
    ("qwen_coder", "", "<tool_call><function=bash></function></tool_call>", call("{}")),
    (
        "qwen_coder",
        "",
        "<tool_call>\n<function=bash>\n<parameter=text>\n\n <b>\n</parameter> x\n\n</parameter>\n"
        "<parameter=count>\n5\n</parameter>\n</function>\n</tool_call>",
        call('{"text": "\\n <b>\\n</parameter> x\\n", "count": 5}'),
    ),
    # GLM
    (
        "glm",
        "",
        f"\n<think>Hm.</think>\nHi.\n{GLM}<|observation|>",
        thought("Hm.") + text("Hi.") + call('{"text": "ls"}'),
    ),
    ("glm", "<think></think>", "\n<tool_call>bash</tool_call><|user|>", call("{}")),
    ("glm", "", "<tool_call>bash<arg_key>count</arg_key><arg_value>5</arg_value></tool_call>", call('{"count": 5}')),
    # Kimi
    (
        "kimi",
        "",
        f"<think>Hm.</think>Hi. <|tool_calls_section_begin|> {KIMI} {KIMI}<|tool_calls_section_end|><|im_end|>",
        thought("Hm.") + text("Hi.") + KIMI_CALL * 2,
    ),
    ("kimi", "<think>", f"Hm.<|tool_calls_section_begin|>{KIMI}<|tool_calls_section_end|>", thought("Hm.") + KIMI_CALL),
    ("kimi", "", KIMI, KIMI_CALL),
    ("kimi", "", "x<|tool_calls_section_end|>", text("x<|tool_calls_section_end|>")),
    # DeepSeek
    (
        "deepseek_v3",
        "",
        f"Hi.<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        text("Hi.") + call() * 2,
    ),
    (
        "deepseek_v31",
        "<｜Assistant｜><think>",
        f"Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>{ONE}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        thought("Hm.") + call(),
    ),
    # Mistral
    ("mistral", "", f"[THINK]Hm.[/THINK]Hi.[TOOL_CALLS]bash[ARGS]{ONE}</s>", thought("Hm.") + text("Hi.") + call()),
    (
        "mistral",
        "",
        f"[TOOL_CALLS]bash[ARGS]{ONE}[TOOL_CALLS]bash[CALL_ID]123456789[ARGS]{ONE}</s>",
        call() + call(written="123456789"),
    ),
    ("mistral", "", f"[TOOL_CALLS]bash[ARGS]{ONE}", call()),
    (
        "mistral_list",
        "",
        f'[TOOL_CALLS] [{{"name": "bash", "arguments": {ONE}, "id": "x"}}, {{"name": "bash", "arguments": {ONE}}}]</s>',
        call() * 2,
    ),
    (
        "mistral_list",
        "",
        '[TOOL_CALLS][{"name": "bash", "arguments": {"text": "[ARGS][TOOL_CALLS]"}}]',
        call('{"text": "[ARGS][TOOL_CALLS]"}'),
    ),
    # Llama
    ("llama3_2", "", f'{{"name": "bash", "parameters": {ONE}}}<|eot_id|>', call()),
    ("llama3_2", "", f'\n {{ "type": "function", "name": "bash", "parameters": {ONE}}}', call()),
    ("llama3_2", "", f'Hi.\n<|python_tag|>{{"name": "bash", "parameters": {ONE}}}<|eom_id|>', text("Hi.") + call()),
    (
        "llama3_2",
        "",
        f'<|python_tag|>{{"name": "bash", "parameters": {ONE}}}; {{"name": "bash", "arguments": {ONE}}}<|eom_id|>',
        call() * 2,
    ),
    ("llama3_2", "", '{"answer": 1}<|eot_id|>', text('{"answer": 1}')),
    (
        "llama3_2",
        "",
        f'It is {{"name": "bash", "parameters": {ONE}}}',
        text(f'It is {{"name": "bash", "parameters": {ONE}}}'),
    ),
    ("llama3_2", "", '{"na', text('{"na')),
    # Harmony
    (
        "harmony",
        "<|start|>assistant",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Hi.<|end|><|start|>assistant{HARMONY}<|call|>",
        thought("Hm.") + text("Hi.") + call(),
    ),
    ("harmony", "<|start|>assistant", "<|channel|>final<|message|>Hi.<|return|>", text("Hi.")),
    ("harmony", "<|start|>assistant", HARMONY, call()),
    (
        "harmony",
        "<|start|>assistant",
        f" to=functions.bash<|channel|>analysis<|message|>{ONE}<|call|>",
        call(),
    ),
    ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", "Hm.<|end|>", thought("Hm.")),
    ("harmony", "<|start|>assistant<|channel|>final<|message|>", "Hi.<|return|>", text("Hi.")),
    ("harmony", "<|start|>assistant", "No header.", text("No header.")),
    # Generic
    ("gemma3", "", "Hi <think>.<end_of_turn>\n", text("Hi <think>.\n")),
    ("gemma3", "", f"Hi.\n{HERMES}", text(f"Hi.\n{HERMES}")),
    ("thinking", "", "<think>Hm. </think> Hi.</s>", thought("Hm.") + text("Hi.")),
    ("thinking", "", "Hi <think>.</s>", text("Hi <think>.")),
]

MALFORMED: list[tuple[str, str, list[ReplyEvent]]] = [
    # Not JSON, not a call, cut short; what is around it is unharmed.
    (
        "scripted",
        f"a\n<tool_call>{{'name': 1}}</tool_call>\n{HERMES}",
        text("a\n<tool_call>{'name': 1}</tool_call>") + call(),
    ),
    ("scripted", '<tool_call>{"name": "bash"}</tool_call>', text('<tool_call>{"name": "bash"}</tool_call>')),
    (
        "scripted",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        text('<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ),
    ("scripted", '<tool_call>{"name": "a", "arguments": {}', text('<tool_call>{"name": "a", "arguments": {}')),
    (
        "scripted",
        '<tool_call>{"name": "a", "arguments": {}}<|im_end|>',
        text('<tool_call>{"name": "a", "arguments": {}}'),
    ),
    (
        "scripted",
        f'<tool_call>{{"name": "open\n</tool_call>{HERMES}',
        text('<tool_call>{"name": "open\n</tool_call>') + call(),
    ),
    ("scripted", f"{HERMES}<tool_call></tool_call>", call() + text("<tool_call></tool_call>")),
    ("scripted", f"<tool_call>{HERMES}", text(f"<tool_call>{HERMES}")),
    ("hermes_as_text", "<tool_call>{}</tool_ca", text("<tool_call>{}</tool_ca")),
    ("qwen_coder", HERMES, text(HERMES)),
    (
        "qwen_coder",
        "<tool_call><function=f>x</function></tool_call>",
        text("<tool_call><function=f>x</function></tool_call>"),
    ),
    (
        "qwen_coder",
        "<tool_call><function=f><parameter=a>x</function></tool_call>",
        text("<tool_call><function=f><parameter=a>x</function></tool_call>"),
    ),
    ("glm", "<tool_call></tool_call>", text("<tool_call></tool_call>")),
    ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>", text("<tool_call>f<arg_key>a</arg_key></tool_call>")),
    ("kimi", "<|tool_calls_section_begin|>", text("<|tool_calls_section_begin|>")),
    (
        "kimi",
        f"<|tool_calls_section_begin|><|tool_call_begin|>x<|tool_call_end|>{KIMI}<|tool_calls_section_end|>",
        text("<|tool_calls_section_begin|><|tool_call_begin|>x<|tool_call_end|>")
        + KIMI_CALL
        + text("<|tool_calls_section_end|>"),
    ),
    ("kimi", "a <|tool_calls_section_begin|> b", text("a <|tool_calls_section_begin|> b")),
    ("deepseek_v3", V3.replace("}", ""), text(V3.replace("}", ""))),
    ("mistral", "[TOOL_CALLS]bash[ARGS]{", text("[TOOL_CALLS]bash[ARGS]{")),
    ("mistral", f"[TOOL_CALLS]bash[ARGS]{{[TOOL_CALLS]bash[ARGS]{ONE}", text("[TOOL_CALLS]bash[ARGS]{") + call()),
    ("mistral_list", "[TOOL_CALLS] []", text("[TOOL_CALLS] []")),
    ("llama3_2", "<|python_tag|>print(1)<|eom_id|>", text("<|python_tag|>print(1)")),
    ("llama3_2", '{"name": "bash", "parameters": {', text('{"name": "bash", "parameters": {')),
    (
        "llama3_2",
        f'{{"name": "bash", "parameters": {ONE}}} done',
        text(f'{{"name": "bash", "parameters": {ONE}}} done'),
    ),
    ("harmony", HARMONY[:-1] + "<|call|>", text(HARMONY[:-1])),
    ("harmony", HARMONY + "<|end|>", text(HARMONY + "<|end|>")),
    ("harmony", HARMONY.replace("functions.bash", "python"), text(HARMONY.replace("functions.bash", "python"))),
    ("harmony", "<|channel|>commentary to=functions.b", text("<|channel|>commentary to=functions.b")),
]


@pytest.mark.parametrize(("name", "prompt_end", "written", "events"), WELL_FORMED)
def test_well_formed(name: str, prompt_end: str, written: str, events: list[ReplyEvent]) -> None:
    assert parse(model(name), written, prompt_end) == (events, False)


@pytest.mark.parametrize(("name", "written", "events"), MALFORMED)
def test_malformed_calls_are_text_and_flagged(name: str, written: str, events: list[ReplyEvent]) -> None:
    assert parse(model(name), written) == (events, True)


CALLS = [
    (name, written) for name, _, written, events in WELL_FORMED if any(isinstance(e, ToolCallStart) for e in events)
]


@pytest.mark.parametrize(("name", "written"), CALLS)
@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_calls_are_not_looked_for(name: str, written: str, tools: Any) -> None:
    events, malformed = parse(model(name), written, tools=tools)
    assert not malformed
    assert not any(isinstance(event, ToolCallStart) for event in events)


def test_markers_spelled_by_other_tokens_are_text() -> None:
    tokenizer = model("scripted")
    ids = [id for half in ("<tool", "_call>{}</tool", "_call><thi", "nk>") for id in tokenizer.encode(half)]
    assert tokenizer.added_tokens["<tool_call>"] not in ids
    assert parse(tokenizer, ids) == (text("<tool_call>{}</tool_call><think>"), False)


def test_text_comes_as_it_is_sampled() -> None:
    """Only white space that may turn out to be formatting is held back."""
    tokenizer = model("scripted")
    parser = detect_family(tokenizer).make_parser(prompt_end="", tools=TOOLS)
    ids = [tokenizer.encode(part)[0] for part in ("a", "\n", "b", "\n", "<tool_call>")]
    assert [parser.feed([id]) for id in ids] == [text("a"), [], text("\nb"), [], []]


def test_deeply_nested_arguments_are_malformed() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    events, malformed = parse(
        model("scripted"), f'<tool_call>{{"name": "a", "arguments": {deep}}}</tool_call>', cuts=[]
    )
    assert malformed
    assert [type(event) for event in events] == [TextDelta]
    events, malformed = parse(model("llama3_2"), f'{{"name": "a", "parameters": {deep}}}', cuts=[])
    assert malformed
    assert [type(event) for event in events] == [TextDelta]


def test_every_model_has_a_reply_here() -> None:
    assert {name for name, *_ in WELL_FORMED} >= set(FAMILY) - {"qwen3", "qwen2_5"}
    assert json.loads(ONE) == {"text": "ls"}


def test_ids_of_calls_as_the_model_is_shown_them() -> None:
    ids = {
        name: detect_family(model(name)).make_call_id("bash", 12) for name in ("scripted", "kimi", "mistral", "harmony")
    }
    assert ids == {"scripted": "call_12", "kimi": "functions.bash:12", "mistral": "call00012", "harmony": "call_12"}
