"""The cells of a matrix."""

from pathlib import Path

from polar.matrix.results import Cell, GradedSession, Matrix, ModelSessions, make_cell
from tests.unit.export.stored import fill, session

KEYS = {"a": "key of a", "b": "key of b"}


def seen(*outcomes: tuple[str, int, float]) -> ModelSessions:
    return ModelSessions({(f"key of {task}", sample): GradedSession(reward, 10) for task, sample, reward in outcomes})


def counted(found: ModelSessions, samples: int = 2) -> Cell:
    return make_cell(found, "m", "pi", KEYS, samples)


def test_pass_at_1_is_the_mean_over_tasks() -> None:
    found = counted(seen(("a", 0, 1.0), ("a", 1, 0.0), ("b", 0, 1.0), ("b", 1, 1.0)))
    assert (found.pass_at_1, found.stderr) == (0.75, 0.25)
    assert (found.asked, found.graded, found.solved, found.tasks, found.tokens) == (4, 4, 3, 2, 10)
    assert Matrix(["m"], ["pi"], 2, 2, [found]).is_complete


def test_a_task_with_more_sessions_counts_no_more() -> None:
    found = counted(seen(("a", 0, 1.0), ("a", 1, 1.0), ("b", 0, 0.0)))
    assert found.pass_at_1 == 0.5
    assert not Matrix(["m"], ["pi"], 2, 2, [found]).is_complete


def test_what_does_not_count() -> None:
    """Other tasks, or these as they were before; more samples than were asked for; tries that came to nothing."""
    some = seen(("c", 0, 1.0), ("b", 0, 0.0), ("b", 1, 0.0), ("b", 2, 1.0))
    some.failed = {("key of a", 0): ["engine_failed", "node_lost"], ("key of b", 0): ["sandbox_failed"]}
    found = counted(some)
    assert (found.pass_at_1, found.graded, found.reasons) == (0.0, 2, {"engine_failed": 1, "node_lost": 1})


def test_part_of_a_reward_is_not_solved() -> None:
    assert counted(seen(("a", 0, 0.9)), samples=1).solved == 0


async def test_of_two_sessions_of_a_sample_the_newer_counts(tmp_path: Path) -> None:
    of_sample = {"task_key": "key of a", "sample": 0}
    older = session("older", 0, reward=0.0, metadata=of_sample)
    await fill(tmp_path / "polar.db", [older, session("newer", 1, reward=1.0, metadata=of_sample)])
    assert [outcome.reward for outcome in (await ModelSessions.load(tmp_path)).graded.values()] == [1.0]


async def test_nothing_yet(tmp_path: Path) -> None:
    found = counted(await ModelSessions.load(tmp_path))
    assert (found.pass_at_1, found.stderr, found.graded, found.tokens) == (None, None, 0, None)
