"""A family is recognised by the template and the tokens."""

import pytest

from polar.engines.scripted import TOKENIZER_FOLDER
from polar.rendering.families import FAMILIES, detect_family
from polar.rendering.tokenizer import Tokenizer
from tests.unit.rendering.families.models import FAMILY, fixture, model, small


@pytest.mark.parametrize(("name", "family"), FAMILY.items())
def test_families(name: str, family: str) -> None:
    assert detect_family(model(name)).name == family


def test_every_family_is_met_here() -> None:
    assert {family.name for family in FAMILIES} == set(FAMILY.values())


@pytest.mark.parametrize(
    ("tokens", "template", "family"),
    [
        # A model that was trained further on another family's replies keeps its tokens: the template decides.
        ("<tool_call> </tool_call> <|im_end|>", fixture("deepseek"), "deepseek"),
        ("<|python_tag|> <|eot_id|>", "<tool_call> parameters", "hermes"),
        # Tokens without a word of tools in the template: it never learnt to call any.
        ("<|im_start|> <tool_call> </tool_call> <think> </think>", "{{ messages[0].content }}", "generic"),
        ("<|python_tag|>", "{{ messages[0].content }}", "generic"),
    ],
)
def test_mixed_signs(tokens: str, template: str, family: str) -> None:
    assert detect_family(small(tokens.split(), template, "</s>")).name == family


def test_without_a_template() -> None:
    backend = Tokenizer.load(TOKENIZER_FOLDER).backend
    assert detect_family(Tokenizer(backend, {}, None)).name == "generic"
