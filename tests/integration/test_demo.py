"""The demo's tasks and agent as a black box, against a real gateway: with written turns, and with a small model."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import polar as package
from polar.cli import demo
from polar.config import Settings
from polar.demo import demo_folder, tasks
from polar.demo.questions import make_questions
from polar.errors import ConfigError
from tests.unit.train import tiny

EXAMPLE = [{"text": "lookup(Anna)"}, {"text": "answer(35)"}]
"""The scripted engine counts the model's turns, and the agent's example has two."""


def earned(folder: Path, *said: str) -> list[float | None]:
    """What each question earns where the model says this."""
    (folder / "play.json").write_text(json.dumps({"turns": [*EXAMPLE, *({"text": text} for text in said)]}))
    settings = Settings.model_validate({"engine": {"kind": "scripted", "options": {"play": str(folder / "play.json")}}})
    results = package.run(folder / "train.jsonl", data=folder / ".polar", settings=settings)
    return [result.reward for result in results]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tasks.write_tasks(tmp_path, make_questions(train=2, held_out=1, seed=0), hops=1)
    return tmp_path


def test_only_the_right_answer_earns_anything(folder: Path) -> None:
    asked = make_questions(train=2, held_out=1, seed=0).train
    assert asked[0].answer != asked[1].answer
    assert earned(folder, f"lookup({asked[0].name})", f"answer({asked[0].answer})") == [1.0, 0.0]


def test_who_never_answers_earns_nothing(folder: Path) -> None:
    assert earned(folder, "I would rather not.") == [0.0, 0.0]


@pytest.mark.slow
async def test_a_demo_from_its_questions_to_its_picture(tmp_path: Path) -> None:
    """With a model that knows nothing: it earns nothing, and what it said is verified all the same."""
    wanted = demo_folder.DemoOptions(
        tiny.folder(tmp_path / "model"), trained_layers=1, steps=1, groups=1, sessions=4, held_out=1
    )
    settings = demo_folder.create_demo_folder(tmp_path / "demo", wanted)
    small = {"engine": {"options": {"device": "cpu", "threads": 1, "memory_gib": 0.02}}}
    settings = settings.model_copy(update={"polar": settings.polar | small})
    ended = await demo.run_demo(settings, Console(stderr=True), silent=True)
    assert isinstance(ended, demo.DemoResult)
    assert (ended.reward_before, ended.reward_after) == (0.0, 0.0)
    assert ended.verified.sessions == 1 + 4 + 1
    assert ended.verified.describe_failure(1e-4) is None
    assert ended.recomputed.comparison is not None
    assert ended.recomputed.comparison.tokens > 0
    assert ended.recomputed.comparison.largest <= 1e-4
    assert ended.picture.stat().st_size > 0


def test_a_demo_that_was_begun_goes_on_with_its_own_settings(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    assert demo_folder.load_existing(folder) is None
    wanted = demo_folder.DemoOptions(tmp_path, trained_layers=1, steps=2, groups=2, held_out=2)
    assert demo_folder.create_demo_folder(folder, wanted) == demo_folder.load_existing(folder)
    done = CliRunner().invoke(demo.command, ["--output", str(folder), "--steps", "9"])
    assert isinstance(done.exception, ConfigError)
    assert "omit --steps" in str(done.exception)
