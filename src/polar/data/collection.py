"""Which sessions a collection still needs, within a budget: what the data folder has already is not run again, a task
that was solved gets no more tries, and what the platform failed is tried again.

    store ─► resume ─► next ─► session ─► ended ─► next ...
"""

import contextlib
import fcntl
import heapq
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct, field

from polar.backoff import backoff_delays
from polar.config import PriceSettings
from polar.errors import ConfigError
from polar.folders import make_private_folder
from polar.node.finished_session import FinishedSession
from polar.node.task_plan import TaskPlan
from polar.records.sample import final_verdict, is_final, sample_key
from polar.records.session import PLATFORM_REASONS, Verdict
from polar.store.base import Store
from polar.types import UsageTotals

log = logging.getLogger(__name__)

_TOKENS_PER_PRICE = 1_000_000
_PAGE_SIZE = 100
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0  # before another try
_LOCK_FILE = "collecting.lock"


def compute_cost(used: UsageTotals, price: PriceSettings) -> float:
    cached = price.prompt if price.cached is None else price.cached
    new = used.prompt - used.cached
    return (new * price.prompt + used.cached * cached + used.sampled * price.sampled) / _TOKENS_PER_PRICE


class Budget(Struct, frozen=True):
    """None: as much as it takes. Tokens and money count for all sessions of the collection, those of runs before
    included; seconds are those of this run."""

    tokens: int | None = None  # of prompts, and sampled ones
    cost: float | None = None  # in the currency of the price
    seconds: float | None = None
    price: PriceSettings | None = None

    @property
    def is_limited(self) -> bool:
        return self.tokens is not None or self.cost is not None or self.seconds is not None

    def __post_init__(self) -> None:
        if self.cost is not None and self.price is None:
            raise ConfigError(
                "A budget of money needs to know what tokens cost: --price PROMPT SAMPLED, or [engine.price]."
            )


NO_LIMIT = Budget()


class Spending:
    """A budget, and what is gone of it."""

    def __init__(
        self, budget: Budget, measure_used: Callable[[], UsageTotals], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`used`: by the sessions of this run so far."""
        self._budget = budget
        self._measure_used = measure_used
        self._used_earlier = UsageTotals()
        self._clock = clock
        self._started_at = clock()

    def add_earlier_usage(self, used: UsageTotals) -> None:
        """What a session of an earlier run used."""
        self._used_earlier += used

    @property
    def used(self) -> UsageTotals:
        return self._used_earlier + self._measure_used()

    @property
    def cost(self) -> float | None:
        return None if self._budget.price is None else compute_cost(self.used, self._budget.price)

    def find_exhausted_limit(self) -> str | None:
        """In words, what is; None where more may begin. Raises ConfigError where nobody can tell."""
        budget = self._budget
        if budget.seconds is not None and self._clock() - self._started_at >= budget.seconds:
            return f"{budget.seconds:g} seconds"
        if budget.tokens is None and budget.cost is None:
            return None
        used = self.used
        if used.uncounted:
            raise ConfigError(
                "The engine does not tell how many tokens a call takes, so a budget of tokens or money can't be kept: "
                "leave it out (--budget-seconds works), or use an engine that reports `usage`."
            )
        if budget.tokens is not None and used.prompt + used.sampled >= budget.tokens:
            return f"{budget.tokens:,} tokens"
        if budget.cost is not None and (spent := self.cost) is not None and spent >= budget.cost:
            return f"a cost of {budget.cost:g}"
        return None


class SourceStats(Struct):
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


class _CollectionTask(Struct):
    plan: TaskPlan
    order: int  # in the order in which tasks begin
    accepted_by_sample: dict[int, bool] = field(
        default_factory=dict
    )  # samples with an outcome, and whether it was accepted
    failed_attempts: dict[int, int] = field(default_factory=dict)  # tries of samples that the platform failed

    @property
    def id(self) -> str:
        return self.plan.task.task_id

    @property
    def key(self) -> str:
        return str(self.plan.task.metadata["task_key"])


class Collection:
    """Implements `node.local.SessionSource`.

    With `accept`, a task's samples are tried one after the other, until one earns that much. So which of them are run
    depends on their rewards alone, however often the run is stopped.
    """

    def __init__(
        self,
        plans: Iterable[TaskPlan],
        measure_used: Callable[[], UsageTotals],
        *,
        min_reward: float | None = None,
        max_attempts: int = 1,
        budget: Budget = NO_LIMIT,
        max_running: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Plans of keyed tasks; `used`: what sessions of this run used so far. With a budget, no more than `at_once`
        are on their way, so that no more go beyond it."""
        ordered = sorted(plans, key=lambda plan: -plan.task.dispatch_priority)
        self._tasks = {plan.task.task_id: _CollectionTask(plan, place) for place, plan in enumerate(ordered)}
        self._min_reward = min_reward
        self._max_attempts = max_attempts
        self._max_running = max_running if budget.is_limited else None
        self._running = 0
        self._clock = clock
        self._ready: list[tuple[int, int, str]] | None = None  # a heap: place, sample, task
        self._retries: list[tuple[float, int, int, str]] = []  # likewise, until a moment: for another try
        self.spending = Spending(budget, measure_used, clock)
        self.num_resumed = 0  # samples that were settled before
        self.exhausted_limit: str | None = None  # what of the budget is used up
        self.stats_by_source: dict[str, SourceStats] = {}  # by source

    async def resume(self, store: Store) -> None:
        """Takes in what earlier runs on the same data left. Their sessions cost something, whatever came of them."""
        tasks = {task.key: task for task in self._tasks.values()}
        last: str | None = None
        while page := await store.list_sessions(limit=_PAGE_SIZE, before=last):
            last = page[-1].session_id
            for session in page:
                key, sample = sample_key(session) or ("", 0)
                if (task := tasks.get(key)) is None:
                    continue
                self.spending.add_earlier_usage(await store.read_usage_totals(session.session_id))
                verdict = final_verdict(session)
                if (
                    verdict is not None
                    and sample not in task.accepted_by_sample
                    and sample < task.plan.task.num_samples
                ):
                    self._settle(task, sample, verdict)
                    self.num_resumed += 1

    def next_sample(self) -> tuple[TaskPlan, int] | None:
        if self._ready is None:
            self._ready = [entry for task in self._tasks.values() for entry in self._list_startable_samples(task)]
            heapq.heapify(self._ready)
        while self._retries and self._retries[0][0] <= self._clock():
            heapq.heappush(self._ready, heapq.heappop(self._retries)[1:])
        if not self._ready or (self._max_running is not None and self._running >= self._max_running):
            return None
        self.exhausted_limit = self.spending.find_exhausted_limit()
        if self.exhausted_limit is not None:
            return None
        _, sample, name = heapq.heappop(self._ready)
        self._running += 1
        return self._tasks[name].plan, sample

    def record_finished(self, finished: FinishedSession) -> bool:
        task, sample, verdict = self._tasks[finished.task_id], finished.sample, finished.verdict
        self._running -= 1
        if verdict.reason in PLATFORM_REASONS:
            attempts = task.failed_attempts[sample] = task.failed_attempts.get(sample, 0) + 1
            if attempts < self._max_attempts and self.exhausted_limit is None:
                self._schedule_retry(task, sample, attempts, finished)
                return False
        if is_final(verdict):
            self._settle(task, sample, verdict)
        elif verdict.reason != "cancelled":
            self._get_stats(task).add(task.id, accepted=False)
        if self._min_reward is not None and self._ready is not None and verdict.reason != "cancelled":
            for entry in self._list_startable_samples(task, sample + 1):
                heapq.heappush(self._ready, entry)
        return True

    @property
    def num_left(self) -> int:
        if self.exhausted_limit is not None:
            return 0
        if self._ready is None:
            return sum(len(list(self._list_startable_samples(task))) for task in self._tasks.values())
        return len(self._ready) + len(self._retries)

    @property
    def num_unsettled(self) -> int:
        """Samples that have no outcome yet, and would be run if nothing stopped it."""
        return sum(len(self._list_unsettled_samples(task)) for task in self._tasks.values())

    def _list_startable_samples(self, task: _CollectionTask, start: int = 0) -> Iterator[tuple[int, int, str]]:
        """What may begin now: all of a task's samples, or the next one, where it depends on its reward whether there is
        another."""
        samples = [sample for sample in self._list_unsettled_samples(task) if sample >= start]
        for sample in samples if self._min_reward is None else samples[:1]:
            yield task.order, sample, task.id

    def _list_unsettled_samples(self, task: _CollectionTask) -> list[int]:
        if self._min_reward is not None and any(task.accepted_by_sample.values()):
            return []
        return [sample for sample in range(task.plan.task.num_samples) if sample not in task.accepted_by_sample]

    def _settle(self, task: _CollectionTask, sample: int, verdict: Verdict) -> None:
        accepted = self.accepts(verdict.reward)
        task.accepted_by_sample[sample] = accepted
        self._get_stats(task).add(task.id, accepted=accepted)

    def accepts(self, reward: float | None) -> bool:
        """As `polar export` does for imitation, where nothing else is said."""
        return reward is not None and (reward > 0 if self._min_reward is None else reward >= self._min_reward)

    def _get_stats(self, task: _CollectionTask) -> SourceStats:
        return self.stats_by_source.setdefault(str(task.plan.task.metadata["source"]), SourceStats())

    def _schedule_retry(self, task: _CollectionTask, sample: int, attempts: int, finished: FinishedSession) -> None:
        pauses = backoff_delays(_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS)
        pause = [next(pauses) for _ in range(attempts)][-1]
        heapq.heappush(self._retries, (self._clock() + pause, task.order, sample, task.id))
        log.warning(
            "%s #%d: %s (%s). It is tried again (%d of %d).",
            task.id,
            sample,
            finished.verdict.reason,
            finished.error or finished.session_id,
            attempts + 1,
            self._max_attempts,
        )


@contextlib.contextmanager
def lock_collection(data: Path) -> Iterator[None]:
    """One collection at a time in a data folder: two would run the same samples, and both would be exported.

    Raises ConfigError where another process collects there. A process that is killed holds no lock.
    """
    make_private_folder(data)
    with (data / _LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another `polar run --resume` is at work in {data}: wait for it, or give this one a folder of its own "
                "(--data)."
            ) from None
        yield
