"""Cheats that were written before their defences: none is rewarded, none is excused; honest sessions keep their reward.

Cheats that are known to win are expected failures, each for a reason that docs/evaluators.md has.

All sessions that were asked for run on one node at the same time, in bubblewrap, and some of them in containers too.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from polar.node.finished_session import FinishedSession
from polar.runtimes.containers import Podman
from tests.attack.blind_tasks import TASKS, build_task, prepare_uploads, run_tasks
from tests.attack.cheats_blind import CHEATS, HONEST, NOT_COUNTED, REMAINS, Cheat, Honest, Scenario
from tests.contract.image import PLAIN, ensure_image

IN_CONTAINERS = {cheat.task for cheat in CHEATS if cheat.containers} | {"harbor install"}
SOLVED = [
    Honest(f"solved: {name}", name, task.solution, name in IN_CONTAINERS)
    for name, task in TASKS.items()
    if task.solution
]
UNSOLVED = [Cheat(f"nothing done: {name}", name, "true", name in IN_CONTAINERS) for name in TASKS]
BACKENDS = {"bubblewrap": pytest.mark.runtimes, "podman": pytest.mark.containers}
DOCS = Path(__file__).parents[2] / "docs" / "evaluators.md"


def mark_expected(session: Scenario) -> list[pytest.MarkDecorator]:
    if session.remains is None:
        return []
    reason = f"{REMAINS[session.remains]} docs/evaluators.md, {session.remains}"
    return [pytest.mark.xfail(strict=not session.is_race, raises=AssertionError, reason=reason)]


def select(sessions: Sequence[Scenario]) -> list[Any]:
    """Each session in each backend that it is meant for."""
    return [
        pytest.param(session, backend, id=f"{session.name} ({backend})", marks=[mark, *mark_expected(session)])
        for backend, mark in BACKENDS.items()
        for session in sessions
        if (session.sandbox if backend == "bubblewrap" else session.containers)
    ]


class Sessions:
    """What became of every session that was asked for, by backend. Each backend runs once."""

    def __init__(self, folder: Path, asked: list[tuple[Scenario, str]]) -> None:
        self._folder = folder
        self._asked = asked
        self._finished: dict[str, dict[str, FinishedSession]] = {}
        prepare_uploads(folder)

    def find(self, name: str, backend: str) -> FinishedSession:
        if backend not in self._finished:
            image = None if backend == "bubblewrap" else self._find_image(backend)
            tasks = [
                build_task(
                    session.name, TASKS[session.task], session.script, self._folder, backend=backend, image=image
                )
                for session, where in self._asked
                if where == backend
            ]
            self._finished[backend] = run_tasks(self._folder / backend, tasks)
        return self._finished[backend][name]

    def _find_image(self, backend: str) -> str:
        if (why := asyncio.run(Podman(self._folder / "probe", "http://127.0.0.1:9").check_availability())) is not None:
            pytest.skip(f"no {backend} here: {why}")
        return ensure_image(backend, PLAIN)


@pytest.fixture(scope="module")
def sessions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sessions:
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = [(call["session"], call["backend"]) for call in calls if isinstance(call.get("session"), Scenario)]
    return Sessions(tmp_path_factory.mktemp("blind"), asked)


@pytest.mark.parametrize(("session", "backend"), select([*SOLVED, *HONEST]))
def test_an_honest_session_keeps_its_reward(sessions: Sessions, session: Scenario, backend: str) -> None:
    finished = sessions.find(session.name, backend)
    assert finished.verdict.reward == 1, (finished.error, finished.verdict)


@pytest.mark.parametrize(("session", "backend"), select([*UNSOLVED, *CHEATS]))
def test_a_cheat_earns_no_more_than_doing_nothing(sessions: Sessions, session: Scenario, backend: str) -> None:
    finished = sessions.find(session.name, backend)
    if finished.verdict.reason is not None:
        pytest.fail(f"It is excused: {finished.verdict.reason} ({finished.error}).")
    assert finished.verdict.reward == 0, finished.verdict


@pytest.mark.parametrize(("session", "backend"), select([NOT_COUNTED]))
def test_changes_to_system_folders_count_only_where_the_task_names_them(
    sessions: Sessions, session: Scenario, backend: str
) -> None:
    verdict = sessions.find(session.name, backend).verdict
    assert verdict.reward == 0
    assert {"/etc/greet.conf", "/opt/greet/bin/greet"} <= set(verdict.detail["not_counted"])


def test_what_remains_is_documented() -> None:
    text = DOCS.read_text()
    assert [name for name in REMAINS if f"**{name}.**" not in text] == []
