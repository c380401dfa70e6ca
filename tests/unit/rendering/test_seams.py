"""What is proved about a template, and what isn't."""

from typing import Any

import pytest

from polar.rendering.encoder import PromptEncoder
from polar.rendering.families import detect_family
from polar.rendering.messages import ContextMessage, Conversation, ModelTurn, find_traits
from polar.rendering.seams import SeamProver
from polar.rendering.skeleton import PieceKind, Renderer
from polar.rendering.tokenizer import Tokenizer
from polar.types import ToolCall
from tests.unit.rendering.hostile import hostile
from tests.unit.rendering.talkers import TALKERS

ASK = Conversation([ContextMessage({"role": "user", "content": "Hi"})], None, {})


def seams(tokenizer: Tokenizer) -> SeamProver:
    call_id = detect_family(tokenizer).make_call_id
    renderer = Renderer(tokenizer.template, find_traits(tokenizer.template, call_id))
    return SeamProver(renderer, PromptEncoder(tokenizer), call_id)


def test_a_template_as_it_should_be() -> None:
    proved = seams(hostile("plain"))
    assert proved.find_opening(ASK) == "<|im_start|>assistant\n"
    for following in ("user", "tool", "system", "assistant"):
        text = proved.prove_seam("c", False, following, ASK)
        assert text is not None
        assert text.closings == {""}
        calls = proved.prove_seam("a", True, following, ASK)
        assert calls is not None
        assert calls.closings == {'"}}</tool_call>'}
        turn = ModelTurn("", "", [ToolCall("x", "bash", "{}")])
        assert '<|im_start|>assistant\n<tool_call>{"name": "bash", "arguments": {"' in proved.list_openings(calls, turn)


@pytest.mark.parametrize(
    ("name", "last", "calls", "following"),
    [
        ("lower-cases", "c", False, "user"),
        ("cuts long text", "c", False, "user"),
        ("escapes", "c", False, "user"),
        ("says everything twice", "c", False, "user"),
        ("next message in the turn", "c", False, "user"),
        ("repeats the turn", "c", False, "user"),
        ("results before calls", "a", True, "tool"),
        ("tells the length of the turn", "c", False, "user"),
        ("tells the length of the arguments", "a", True, "tool"),
        ("no end, no opener", "c", False, "user"),
    ],
)
def test_what_is_not_proved(name: str, last: PieceKind, calls: bool, following: str) -> None:
    assert seams(hostile(name)).prove_seam(last, calls, following, ASK) is None


def test_a_kind_of_turns_can_be_proved_alone() -> None:
    ends = seams(hostile("calls end otherwise"))
    assert ends.prove_seam("c", False, "user", ASK) is not None
    assert ends.prove_seam("a", True, "tool", ASK) is not None
    assert seams(hostile("tells the length of the arguments")).prove_seam("c", False, "user", ASK) is not None


def test_a_generation_prompt_depends_on_the_request() -> None:
    qwen = seams(TALKERS["qwen35"].tokenizer())
    assert qwen.find_opening(ASK) == "<|im_start|>assistant\n<think>\n"
    quiet = Conversation(ASK.items, None, {"enable_thinking": False})
    assert qwen.find_opening(quiet) == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert (
        qwen.find_opening(Conversation([*ASK.items, ModelTurn("", "a", [])], None, {}))
        == "<|im_start|>assistant\n<think>\n"
    )


class Forgetful(dict[Any, Any]):
    """As a memory looks where another thread forgets all between any two steps."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __contains__(self, key: object) -> bool:
        return True


def test_what_another_thread_forgets_meanwhile_is_found_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    known = seams(hostile("plain"))
    seam, opening = known.prove_seam("c", False, "user", ASK), known.find_opening(ASK)
    for name in ("_shape_cache", "_seam_cache", "_openings"):
        monkeypatch.setattr(known, name, Forgetful())
    assert known.prove_seam("c", False, "user", ASK) == seam
    assert known.find_opening(ASK) == opening
