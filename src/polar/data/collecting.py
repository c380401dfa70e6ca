"""Which sessions a collection still needs: what the data folder has already is not run again, a task that was solved
gets no more tries, and what the platform failed is tried again.

    store ─► resume ─► next ─► session ─► ended ─► next ...
"""

import heapq
import logging
import time
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct, field

from polar.backoff import delays
from polar.data.budget import NO_LIMIT, Budget, Spending
from polar.node.finished import Finished
from polar.node.plan import Plan
from polar.rollout.protocol import PLATFORM
from polar.rollout.samples import outcome_of, sample_of, settles
from polar.store.base import Store, Verdict
from polar.types import Used

log = logging.getLogger(__name__)

_PAGE = 100
_FIRST_S, _LONGEST_S = 1.0, 60.0  # before another try


class Rates(Struct):
    """What came of a source's sessions so far."""

    tasks: set[str] = field(default_factory=set)
    solved: set[str] = field(default_factory=set)  # those with an accepted session
    sessions: int = 0
    accepted: int = 0

    def add(self, task_id: str, *, accepted: bool) -> None:
        self.tasks.add(task_id)
        self.sessions += 1
        if accepted:
            self.solved.add(task_id)
            self.accepted += 1


class _Task(Struct):
    plan: Plan
    place: int  # in the order in which tasks begin
    settled: dict[int, bool] = field(default_factory=dict)  # samples with an outcome, and whether it was accepted
    failures: dict[int, int] = field(default_factory=dict)  # tries of samples that the platform failed

    @property
    def id(self) -> str:
        return self.plan.task.task_id

    @property
    def key(self) -> str:
        return str(self.plan.task.metadata["task_key"])


class Collection:
    """Implements `node.local.Wanted`. With `accept`, a task's samples are tried one after the other, until one earns
    that much; so which of them are run depends on their rewards alone, however often the run is stopped."""

    def __init__(
        self,
        plans: Iterable[Plan],
        used: Callable[[], Used],
        *,
        accept: float | None = None,
        attempts: int = 1,
        budget: Budget = NO_LIMIT,
        at_once: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Plans of keyed tasks; `used`: what sessions of this run used so far. With a budget, no more than `at_once`
        are on their way, so that no more go beyond it."""
        ordered = sorted(plans, key=lambda plan: -plan.task.dispatch_priority)
        self._tasks = {plan.task.task_id: _Task(plan, place) for place, plan in enumerate(ordered)}
        self._accept = accept
        self._attempts = attempts
        self._most = at_once if budget.limited else None
        self._running = 0
        self._clock = clock
        self._ready: list[tuple[int, int, str]] | None = None  # a heap: place, sample, task
        self._waiting: list[tuple[float, int, int, str]] = []  # likewise, until a moment: for another try
        self.spending = Spending(budget, used, clock)
        self.found = 0  # samples that were settled before
        self.stopped: str | None = None  # what of the budget is used up
        self.rates: dict[str, Rates] = {}  # by source

    async def resume(self, store: Store) -> None:
        """Takes in what earlier runs on the same data left. Their sessions cost something, whatever came of them."""
        tasks = {task.key: task for task in self._tasks.values()}
        last: str | None = None
        while page := await store.sessions(limit=_PAGE, before=last):
            last = page[-1].session_id
            for session in page:
                key, sample = sample_of(session) or ("", 0)
                if (task := tasks.get(key)) is None:
                    continue
                self.spending.came_before(await store.used(session.session_id))
                verdict = outcome_of(session)
                if verdict is not None and sample not in task.settled and sample < task.plan.task.num_samples:
                    self._settle(task, sample, verdict)
                    self.found += 1

    def next(self) -> tuple[Plan, int] | None:
        if self._ready is None:
            self._ready = [entry for task in self._tasks.values() for entry in self._to_try(task)]
            heapq.heapify(self._ready)
        while self._waiting and self._waiting[0][0] <= self._clock():
            heapq.heappush(self._ready, heapq.heappop(self._waiting)[1:])
        if not self._ready or (self._most is not None and self._running >= self._most):
            return None
        self.stopped = self.spending.used_up()
        if self.stopped is not None:
            return None
        _, sample, name = heapq.heappop(self._ready)
        self._running += 1
        return self._tasks[name].plan, sample

    def ended(self, finished: Finished) -> bool:
        task, sample, verdict = self._tasks[finished.task_id], finished.sample, finished.verdict
        self._running -= 1
        if verdict.reason in PLATFORM:
            tried = task.failures[sample] = task.failures.get(sample, 0) + 1
            if tried < self._attempts and self.stopped is None:
                self._try_again(task, sample, tried, finished)
                return False
        if settles(verdict):
            self._settle(task, sample, verdict)
        elif verdict.reason != "cancelled":
            self._rates(task).add(task.id, accepted=False)
        if self._accept is not None and self._ready is not None and verdict.reason != "cancelled":
            for entry in self._to_try(task, sample + 1):
                heapq.heappush(self._ready, entry)
        return True

    @property
    def left(self) -> int:
        if self.stopped is not None:
            return 0
        if self._ready is None:
            return sum(len(list(self._to_try(task))) for task in self._tasks.values())
        return len(self._ready) + len(self._waiting)

    @property
    def not_run(self) -> int:
        """Samples that have no outcome yet, and would be run if nothing stopped it."""
        return sum(len(self._open(task)) for task in self._tasks.values())

    def _to_try(self, task: _Task, start: int = 0) -> Iterator[tuple[int, int, str]]:
        """What may begin now: all of a task's samples, or the next one, where it depends on its reward whether there is
        another."""
        wanted = [sample for sample in self._open(task) if sample >= start]
        for sample in wanted if self._accept is None else wanted[:1]:
            yield task.place, sample, task.id

    def _open(self, task: _Task) -> list[int]:
        if self._accept is not None and any(task.settled.values()):
            return []
        return [sample for sample in range(task.plan.task.num_samples) if sample not in task.settled]

    def _settle(self, task: _Task, sample: int, verdict: Verdict) -> None:
        accepted = self.accepts(verdict.reward)
        task.settled[sample] = accepted
        self._rates(task).add(task.id, accepted=accepted)

    def accepts(self, reward: float | None) -> bool:
        """As `polar export` does for imitation, where nothing else is said."""
        return reward is not None and (reward > 0 if self._accept is None else reward >= self._accept)

    def _rates(self, task: _Task) -> Rates:
        return self.rates.setdefault(str(task.plan.task.metadata["source"]), Rates())

    def _try_again(self, task: _Task, sample: int, tried: int, finished: Finished) -> None:
        pauses = delays(_FIRST_S, _LONGEST_S)
        pause = [next(pauses) for _ in range(tried)][-1]
        heapq.heappush(self._waiting, (self._clock() + pause, task.place, sample, task.id))
        log.warning(
            "%s #%d: %s (%s). It is tried again (%d of %d).",
            task.id,
            sample,
            finished.verdict.reason,
            finished.error or finished.session_id,
            tried + 1,
            self._attempts,
        )
