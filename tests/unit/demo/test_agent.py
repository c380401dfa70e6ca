"""The agent of examples/lookup, with a model that says what it is told to."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from polar.demo.tasks import find_agent_file


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lookup_agent", find_agent_file())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model:
    """In place of a model, however it is reached."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.asked: list[list[dict[str, str]]] = []

    def __call__(self, messages: list[dict[str, str]]) -> str:
        self.asked.append(list(messages))
        return self.replies.pop(0)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "book.txt").write_text("Milo: 47\nTarin: see Milo\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def solve(agent: ModuleType, *replies: str, lookups: int = 1) -> Model:
    model = Model(*replies)
    agent.solve(model, "Find the number of Milo.", lookups)
    return model


def test_what_it_looks_up_is_told_and_what_it_answers_is_written(agent: ModuleType, workspace: Path) -> None:
    model = solve(agent, "lookup(Milo)", "answer(47)")
    assert model.asked[1][-2:] == [
        {"role": "assistant", "content": "lookup(Milo)"},
        {"role": "user", "content": "Milo: 47"},
    ]
    assert (workspace / "answer.txt").read_text() == "47"


def test_only_the_first_line_counts_and_it_must_be_a_command_alone(agent: ModuleType, workspace: Path) -> None:
    solve(agent, "answer(47)\nI am sure.", lookups=1)
    assert (workspace / "answer.txt").read_text() == "47"
    (workspace / "answer.txt").unlink()
    model = solve(agent, "It is answer(47)", "answer(47), I think", "none\nanswer(47)")
    assert not (workspace / "answer.txt").exists()
    assert model.asked[1][-1] == {"role": "user", "content": agent.RULES}


def test_a_name_that_is_not_there_is_told_so(agent: ModuleType, workspace: Path) -> None:
    model = solve(agent, "lookup(Nobody)", "answer(1)")
    assert model.asked[1][-1]["content"] == "Nobody: not found"


def test_it_gives_up_in_the_end(agent: ModuleType, workspace: Path) -> None:
    model = solve(agent, *["lookup(Milo)"] * 9, lookups=2)
    assert len(model.asked) == 4  # two look-ups, an answer, and one to spare
    assert not (workspace / "answer.txt").exists()


def test_the_example_of_a_chain_shows_one(agent: ModuleType, workspace: Path) -> None:
    alone = solve(agent, "answer(1)").asked[0]
    chain = solve(agent, "answer(1)", lookups=2).asked[0]
    assert not any("see" in message["content"] for message in alone)
    assert any("see" in message["content"] for message in chain)
    assert [message["role"] for message in chain[1:]] == ["user", "assistant"] * 3 + ["user"]
