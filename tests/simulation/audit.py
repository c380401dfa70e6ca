"""What must hold, looked at after every transaction: each row of the queue changes only in ways that are allowed."""

import sqlite3
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from polar.records.session import PLATFORM_REASONS
from polar.rollout.protocol import INTERRUPTED, FinishStatus, SessionOutcome
from polar.rollout.queue.selection import SUSPECT_KILLS

if TYPE_CHECKING:
    from tests.simulation.world import World

_WORK = (
    "SELECT work_id, run, task_id, sample, state, fence, attempt, kills, node, cursor, session_id, usable, summary "
    "FROM work ORDER BY work_id"
)
_TASKS = "SELECT run, task_id, state, cancelled, samples, ended, usable, cursor FROM tasks ORDER BY run, task_id"
_UNTAKEN = (
    "SELECT COUNT(*) FROM work WHERE run = ? AND usable = 1 AND cursor > "
    "COALESCE((SELECT MIN(cursor) FROM consumers WHERE run = ?), 0)"
)
_NEXT = {
    "queued": {"queued", "leased", "done"},
    "leased": {"leased", "queued", "waiting", "done"},
    "waiting": {"waiting", "queued", "done"},
    "done": {"done"},
}
_SESSIONLESS = {
    "cancelled",
    "early_stop",
    "not_runnable",
    "store_failed",
    "node_failed",
    "node_killer",
    INTERRUPTED,
}


class Work(Struct):
    work_id: int
    run: str
    task_id: str
    sample: int
    state: str
    fence: int
    attempt: int
    kills: int
    node: str | None
    cursor: int | None
    session_id: str | None
    usable: int | None
    summary: str | None


class Task(Struct):
    run: str
    task_id: str
    state: str
    cancelled: str | None
    samples: int
    ended: int
    usable: int
    cursor: int | None


class Audit:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._raw: tuple[list[Any], list[Any]] = ([], [])
        self.work: dict[int, Work] = {}
        self.tasks: dict[tuple[str, str], Task] = {}
        self._leased_at: dict[int, float] = {}
        self._highest = 0  # cursor
        self._consumers: dict[tuple[str, str], int] = {}

    def committed(self, db: sqlite3.Connection) -> None:
        raw = (db.execute(_WORK).fetchall(), db.execute(_TASKS).fetchall())
        if raw == self._raw:
            return
        before = dict(zip((row[0] for row in self._raw[0]), self._raw[0], strict=True))
        self._raw = raw
        tasks = {(task.run, task.task_id): task for task in (Task(*row) for row in raw[1])}
        changed = []
        for row in raw[0]:
            if before.get(row[0]) != row:
                work = Work(*row)
                changed.append((self.work.get(work.work_id), work))
                self.work[work.work_id] = work
        cursors = [work.cursor for was, work in changed if work.cursor is not None]
        for name, task in tasks.items():
            self._check_task(self.tasks.get(name), task, cursors)
        self.tasks = tasks
        for was, work in changed:
            self._check_work(was, work)
        if len(set(cursors)) != len(cursors) or any(cursor <= self._highest for cursor in cursors):
            self._fail(f"Cursors {cursors} are given out after {self._highest}.")
        self._highest = max((self._highest, *cursors))
        for run in {work.run for was, work in changed if work.state == "leased"}:
            self._check_running(db, run)
        for run in {work.run for was, work in changed if was is None}:
            self._check_queued(run)

    def _fail(self, problem: str) -> None:
        self._world.fail(problem)

    def _check_work(self, was: Work | None, work: Work) -> None:
        if self._world.says:
            name = f"{work.task_id}/{work.sample} ({work.work_id})"
            self._world.note("database", f"{name} {was and was.state} -> {_shown(work)}")
        if was is None:
            if (work.state, work.fence, work.attempt, work.kills) != ("queued", 0, 0, 0):
                self._fail(f"New work begins as {work}.")
            return
        step = (was.state, work.state)
        if work.state not in _NEXT[was.state] or was.state == "done":
            self._fail(f"Work goes from {was} to {work}.")
        if work.fence != was.fence + (step == ("queued", "leased")):
            self._fail(f"The fence goes from {was} to {work}.")
        # What is to be tried again may be stopped in the same transaction: others of its task were enough.
        stopped = step == ("leased", "done") and work.session_id is None
        more = (1,) if step == ("leased", "waiting") else (0, 1) if stopped else (0,)
        if work.attempt - was.attempt not in more or work.attempt >= self._world.schedule.attempts:
            self._fail(f"Attempts go from {was} to {work}.")
        acquitted = was.kills - 1 if was.state == work.state else was.kills  # its node was only silent
        if work.kills not in (was.kills, was.kills + (step == ("leased", "queued")), acquitted):
            self._fail(f"Kills go from {was} to {work}.")
        if work.kills and not self._world.schedule.deadly and not self._world.killers:
            self._fail(f"No node died, and yet {work}.")
        if step == ("queued", "leased"):
            self._leased_at[work.work_id] = self._world.loop.time()
            if self.tasks[work.run, work.task_id].cancelled is not None:
                self._fail(f"A cancelled task's work is begun: {work}.")
        if work.state == "done":
            self._check_end(was, work)

    def _check_end(self, was: Work, work: Work) -> None:
        ended = msgspec.json.decode(work.summary or "", type=SessionOutcome)
        if (ended.work_id, ended.fence) != (work.work_id, work.fence) or work.usable != (ended.reason is None):
            self._fail(f"The result of {work} is that of {ended}.")
        if work.session_id is None:
            self._check_sessionless(was, work, ended)
            return
        session = self._world.sessions[work.session_id]
        is_its = (
            was.state == "leased"
            and (session.node_id, session.task, session.sample) == (was.node, (work.run, work.task_id), work.sample)
            and session.began >= self._leased_at[work.work_id]
        )
        if not is_its:
            self._fail(f"{session} is none of the last lease's of {was}.")
        if session.own_store and work.session_id not in self._world.disk.copies:
            self._fail(f"{session} has a result, and the server has no copy of it.")
        self.disowned(work.session_id)
        verdict = session.verdict
        if verdict is None or (ended.reason != "stale" and ended.reward != verdict.reward):
            self._fail(f"{session} is told as {ended}.")
        if ended.reason == "lease_lost":
            self._fail(f"A lost session has a result: {ended}.")
        cancelled = self.tasks[work.run, work.task_id].cancelled is not None
        if ended.reason in PLATFORM_REASONS and was.attempt + 1 < self._world.schedule.attempts and not cancelled:
            self._fail(f"{work} was not tried again: {ended.reason}.")

    def _check_sessionless(self, was: Work, work: Work, ended: SessionOutcome) -> None:
        if ended.reason not in _SESSIONLESS:
            self._fail(f"{work} ends without a session: {ended.reason}.")
        task = self._world.tasks[work.run, work.task_id]
        if ended.reason == "node_killer" and (not task.poison or was.kills < SUSPECT_KILLS):
            self._fail(f"Innocent work is set aside: {was}.")
        cancelled = self.tasks[work.run, work.task_id].cancelled
        if ended.reason in ("cancelled", "early_stop") and cancelled is None:
            self._fail(f"{work} ends as {ended.reason}, and nobody has cancelled its task.")

    def _check_task(self, was: Task | None, task: Task, cursors: list[int]) -> None:
        if was == task:
            return
        mine = [work for work in self.work.values() if (work.run, work.task_id) == (task.run, task.task_id)]
        done = [work for work in mine if work.state == "done"]
        if len(mine) != task.samples or (task.ended, task.usable) != (
            len(done),
            sum(work.usable or 0 for work in done),
        ):
            self._fail(f"{task} has {len(mine)} samples, {len(done)} of them done.")
        if (task.state != "running") != (task.ended == task.samples) or (task.cursor is None) != (
            task.state == "running"
        ):
            self._fail(f"{task} has ended, or not.")
        if task.cursor is not None and any((work.cursor or 0) >= task.cursor for work in mine):
            self._fail(f"{task} ends before its sessions do.")
        if was is not None and was.state != "running":
            self._fail(f"{was} has ended, and becomes {task}.")
        if task.cursor is not None:
            cursors.append(task.cursor)

    def _check_running(self, db: sqlite3.Connection, run: str) -> None:
        running = sum(work.state == "leased" and work.run == run for work in self.work.values())
        quotas = self._world.quotas(run)
        most = max((one.max_running if one.max_running is not None else 1 << 30) for one in quotas)
        if running > most:
            self._fail(f"{running} sessions of {run} run, and {most} may.")
        ahead = max((one.max_ahead if one.max_ahead is not None else 1 << 30) for one in quotas)
        untaken = db.execute(_UNTAKEN, (run, run)).fetchone()[0]
        if running + untaken > ahead:
            self._fail(f"{running} sessions of {run} run, {untaken} wait for its trainer, and {ahead} may be both.")

    def _check_queued(self, run: str) -> None:
        queued = sum(work.state == "queued" and work.fence == 0 and work.run == run for work in self.work.values())
        most = max((one.max_queued if one.max_queued is not None else 1 << 30) for one in self._world.quotas(run))
        if queued > most:
            self._fail(f"{queued} sessions of {run} are queued, and {most} may be.")

    def told(self, ended: SessionOutcome, answer: FinishStatus) -> None:
        """What a node was answered to an end."""
        work = self.work[ended.work_id]
        again = ended.reason in PLATFORM_REASONS or ended.reason == INTERRUPTED
        if ended.reason == INTERRUPTED and ended.session_id is not None:
            self._world.check_interrupted(self._world.sessions[ended.session_id])
        if answer == "taken" and ended.session_id is not None and not again and work.session_id != ended.session_id:
            self._fail(f"A node was told that {ended} is taken; there is {work}.")

    def disowned(self, session_id: str) -> None:
        """Its node has taken its reward away, if so: another one is to stand for it."""
        if self._world.disk.disowned.get(session_id) == "superseded":
            for work in self.work.values():
                if work.session_id == session_id:
                    self._fail(f"A node has disowned the session of {work}.")

    @property
    def at_rest(self) -> bool:
        return all(task.state != "running" for task in self.tasks.values())


def _shown(work: Work) -> str:
    at = f" at {work.node}" if work.state == "leased" else ""
    why = f" {work.session_id} {msgspec.json.decode(work.summary)['reason']}" if work.summary else ""
    return f"{work.state}{at} fence {work.fence} attempt {work.attempt} kills {work.kills}{why}"
