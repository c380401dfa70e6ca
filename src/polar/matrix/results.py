"""What became of sessions, as a model's store has it; and the table's cells, counted from that."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec
from msgspec import Struct, field

from polar.records.sample import SampleKey, final_verdict, sample_key
from polar.store import open_store

_PAGE_SIZE = 1000


class GradedSession(Struct, frozen=True):
    reward: float
    tokens: int  # sampled

    @property
    def is_solved(self) -> bool:
        return self.reward >= 1


class ModelSessions(Struct):
    """All sessions of a model so far."""

    graded: dict[SampleKey, GradedSession] = field(default_factory=dict)
    failed: dict[SampleKey, list[str]] = field(default_factory=dict)  # reasons of tries that came to nothing

    @classmethod
    async def load(cls, data: Path) -> "ModelSessions":
        sessions = cls()
        if not (data / "polar.db").exists():
            return sessions
        store = open_store(f"sqlite:{data / 'polar.db'}")
        try:
            last: str | None = None
            while page := await store.list_sessions(limit=_PAGE_SIZE, before=last):
                last = page[-1].session_id
                for session in page:
                    if (sample := sample_key(session)) is None:
                        continue
                    verdict = final_verdict(session)
                    if verdict is not None and verdict.reward is not None:
                        if sample in sessions.graded:  # of two, the newer one counts, as where a collection resumes
                            continue
                        used = await store.read_usage_totals(session.session_id)
                        sessions.graded[sample] = GradedSession(verdict.reward, used.sampled)
                    elif session.reason is not None:
                        sessions.failed.setdefault(sample, []).append(session.reason)
        finally:
            await store.close()
        return sessions


class Cell(Struct, frozen=True):
    """A model in a harness."""

    model: str
    harness: str
    asked: int  # sessions
    graded: int
    solved: int
    tasks: int  # that have graded sessions
    pass_at_1: float | None  # the mean over tasks of the share of their sessions that are solved
    stderr: float | None  # of that mean, over tasks
    reasons: dict[str, int]  # of tries without a reward, where none had one
    tokens: float | None  # sampled, in the mean of graded sessions


class Matrix(Struct, frozen=True):
    models: list[str]
    harnesses: list[str]
    tasks: int
    samples: int
    cells: list[Cell]

    @property
    def is_complete(self) -> bool:
        return all(cell.graded == cell.asked for cell in self.cells)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields | {"complete": self.is_complete}


def make_cell(sessions: ModelSessions, model: str, harness: str, keys: Mapping[str, str], samples: int) -> Cell:
    """`keys`: of the tasks as this harness runs them."""
    expected = {task: [(key, sample) for sample in range(samples)] for task, key in keys.items()}
    by_task = {
        task: [sessions.graded[one] for one in ones if one in sessions.graded] for task, ones in expected.items()
    }
    graded = [outcome for outcomes in by_task.values() for outcome in outcomes]
    shares = [fmean(outcome.is_solved for outcome in outcomes) for outcomes in by_task.values() if outcomes]
    missing = [one for ones in expected.values() for one in ones if one not in sessions.graded]
    return Cell(
        model,
        harness,
        asked=len(keys) * samples,
        graded=len(graded),
        solved=sum(outcome.is_solved for outcome in graded),
        tasks=len(shares),
        pass_at_1=_mean_or_none(shares),
        stderr=stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None,
        reasons=dict(Counter(reason for one in missing for reason in sessions.failed.get(one, []))),
        tokens=_mean_or_none(outcome.tokens for outcome in graded),
    )


def _mean_or_none(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None
