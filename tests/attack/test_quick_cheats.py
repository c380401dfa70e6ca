"""The cheats that need no sandbox: their defences do not depend on one. test_blind_cheats.py runs all of them.

One test, so that the sessions run at the same time on one node, however tests are spread over processes.
"""

from pathlib import Path

from tests.attack.blind_tasks import TASKS, build_task, run_tasks
from tests.attack.cheats_blind import CHEATS, HONEST, Scenario


def test_no_cheat_is_rewarded_or_excused(tmp_path: Path) -> None:
    every: list[Scenario] = [*CHEATS, *HONEST]
    sessions = [session for session in every if session.quick]
    tasks = [build_task(one.name, TASKS[one.task], one.script, tmp_path, backend="local") for one in sessions]
    finished = run_tasks(tmp_path / "node", tasks)
    wrong = [
        f"{session.name}: {verdict.reward if verdict.reason is None else verdict.reason}"
        for session in sessions
        if (verdict := finished[session.name].verdict).reward != session.reward
    ]
    assert not wrong, "\n".join(wrong)
