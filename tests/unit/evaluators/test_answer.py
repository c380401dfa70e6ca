import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.evaluators import answer as answer_module
from polar.evaluators.answer import Answer, extract_answer, extract_last_number, normalize
from polar.testing.grading import WorkFactory


async def reward(place: WorkFactory, answer: str, **config: Any) -> float | None:
    work = await place.create_work()
    work.answer = answer
    return (await Answer(config).evaluate(work)).reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 7.\nAnswer: 8", "8"),
        ("Answer: 7\n\n**Final answer:** *Paris*\nBye.", "*Paris*"),
        ("the answer is 42.", "42."),
        ("Answer: 1\nso \\boxed{\\frac{1}{2}} is it", "\\frac{1}{2}"),
        ("\\boxed{1} or \\boxed{2}", "2"),
        ("\\boxed{1", "\\boxed{1"),
        ("} } plain", "} } plain"),
        ("Answer:\n", "Answer:\n"),
    ],
)
def test_the_final_answer(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("match", "expected", "answer", "right"),
    [
        ("exact", "Paris", " Paris\n", True),
        ("exact", "Paris", "paris", False),
        ("exact", "Paris", "Paris.", False),
        ("normalized", "Paris", "**PARIS**.", True),
        ("normalized", "new  york", '"New York"', True),
        ("normalized", "5", "-5", False),
        ("normalized", "5", ".5", False),
        ("normalized", "2**3", "23", False),
        ("normalized", "Paris", "Paris or London", False),
        ("normalized", ["Paris", "Paname"], "paname", True),
        ("normalized", 42, "42", True),
        ("normalized", "x", "", False),
        ("contains", "Paris", "I think it is *Paris*, France.", True),
        ("contains", "4", "It is 42.", False),
        ("regex", r"^v\d+$", "v12", True),
        ("regex", r"(?i)^V\d+$", "v12", True),
        ("regex", r"^v\d+$", "v", False),
        ("number", 1234.5, "about 7, no: $1,234.50", True),
        ("number", "0.75", "3/4", True),
        ("number", 4, "3/4", False),
        ("number", 15, "from 10-15", True),
        ("number", -15, "it is −15", True),
        ("number", 15, "16", False),
        ("number", 15, "none", False),
        ("number", 15, "1/0", False),
        ("number", 15, "nan inf 1e999", False),
    ],
)
async def test_matching(place: WorkFactory, match: str, expected: Any, answer: str, right: bool) -> None:
    assert await reward(place, answer, match=match, expected=expected) == float(right)


async def test_a_tolerance_is_absolute(place: WorkFactory) -> None:
    assert await reward(place, "3.1", match="number", expected=3.14, tolerance=0.05) == 1.0
    assert await reward(place, "3.0", match="number", expected=3.14, tolerance=0.05) == 0.0


async def test_a_pattern_says_which_part_is_the_answer(place: WorkFactory) -> None:
    text = "<a>1</a> then <a>2</a>\nAnswer: 3"
    assert await reward(place, text, expected="2", pattern="<a>(.*?)</a>") == 1.0
    assert await reward(place, text, expected="<a>2</a>", match="exact", pattern="<a>.?</a>") == 1.0
    assert await reward(place, text, expected="3", pattern="<a>(.*?)</a>") == 0.0
    assert await reward(place, "Answer: 3", expected="3", pattern="<a>(.*?)</a>") == 0.0


async def test_an_empty_answer_is_never_right(place: WorkFactory) -> None:
    assert await reward(place, "<a> </a>", expected=".*", match="regex", pattern="<a>(.*?)</a>") == 0.0


async def test_a_text_made_to_stop_the_search_earns_nothing(
    place: WorkFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_module, "_SEARCH_TIMEOUT_SECONDS", 0.5)
    assert await reward(place, "a" * 5000, expected="a", pattern="(a+)+b") == 0.0


@pytest.mark.parametrize(
    ("agent", "right"),
    [
        ("mkdir out; echo Paris > out/answer", 1.0),
        ("mkdir out; echo London > out/answer", 0.0),
        ("true", 0.0),
        ("mkdir -p out/answer", 0.0),
        ("mkdir out; echo Paris > x; ln -s ../x out/answer", 0.0),
        ("mkdir out; truncate -s 1T out/answer", 0.0),
    ],
)
async def test_an_answer_in_a_file(place: WorkFactory, agent: str, right: float) -> None:
    work = await place.create_work(agent)
    work.answer = "Paris"
    verdict = await Answer({"expected": "paris", "file": "out/answer"}).evaluate(work)
    assert (verdict.reward, verdict.reason) == (right, None)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "config.expected"),
        ({"expected": []}, "config.expected"),
        ({"expected": "?!"}, "config: expected"),
        ({"expected": " ", "match": "exact"}, "config: expected"),
        ({"expected": "x", "match": "number"}, "config: expected"),
        ({"expected": "(", "match": "regex"}, "config"),
        ({"expected": "x", "pattern": "("}, "config.pattern"),
        ({"expected": "x", "match": "close"}, "config.match"),
        ({"expected": "1", "match": "number", "tolerance": "nan"}, "config.tolerance"),
        ({"expected": "x", "answer": "x"}, "config.answer"),
    ],
)
def test_a_config_that_cant_be_used_names_the_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}\b"):
        Answer(config)


@given(st.text(alphabet=st.sampled_from("ab -+.,/*_`~\\{}boxed:Answer\n0123eE"), max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    assert extract_answer(text) in text
    assert normalize(text) == normalize(f" {text.upper()}\n")
    number = extract_last_number(text)
    assert number is None or math.isfinite(number)
