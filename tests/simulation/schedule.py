"""What happens in a schedule: all of it is drawn from its seed."""

import random
from typing import Any

from msgspec import Struct, field

from polar.records.task import TaskRequest
from polar.rollout.runs import Quotas

LANES = ("one", "two")

FAULTS = (
    "kill_server",
    "replace_server",  # it stands still while another one is started, and goes on then
    "freeze_server",
    "kill_node",
    "freeze_node",
    "stop_node",
    "drain_node",
    "cut_off",
    "bad_network",
    "bad_database",
    "set_clock",
    "kill_trainer",
    "preempt_node",  # it is told to end, and killed a little later
)
HARMLESS = frozenset({"set_clock", "kill_trainer", "drain_node"})
"""Faults that make no node look dead."""

REASONS = ("sandbox_failed", "engine_failed", "node_failed", "grader_failed", "timeout")


class Task(Struct):
    """A task of a trainer's, and what its sessions are like."""

    request: TaskRequest
    at: float  # seconds
    seconds: float  # that its sessions run, about
    poison: bool = False  # kills its node
    fails: float = 0.0  # how often
    not_runnable: bool = False
    cancel_at: float | None = None

    @property
    def name(self) -> tuple[str, str]:
        return self.request.run, self.request.task_id


class Machine(Struct):
    name: str
    lanes: list[str]
    slots: int
    own_store: bool = False
    inside: bool = False  # the server's own process


class Fault(Struct):
    at: float
    kind: str
    seconds: float  # that it lasts


class Schedule(Struct):
    seed: int
    attempts: int
    lease_seconds: float
    beat_seconds: float
    machines: list[Machine]
    tasks: list[Task]
    quotas: dict[str, Quotas]
    faults: list[Fault]
    kinds: list[str]
    ends: float  # from then on all goes well
    flaky_hosts: float  # how often a node can't begin a session
    steers: bool
    runs: list[str] = field(default_factory=list)

    @property
    def deadly(self) -> bool:
        """Whether nodes that are not poisoned can seem to die."""
        return bool(set(self.kinds) - HARMLESS) or any(machine.inside for machine in self.machines)


def drawn(seed: int) -> Schedule:
    """Most are small: much happens in little time. Some are large, for what takes many."""
    rng = random.Random(seed)
    large = rng.random() < 0.08
    runs = ["default", "other"][: rng.choice((1, 1, 2))]
    machines = [
        Machine(
            f"node-{number}",
            list(LANES) if rng.random() < 0.7 or number == 0 else [rng.choice(LANES)],
            rng.choice((1, 1, 2, 4, 16)),
            own_store=rng.random() < 0.2,
        )
        for number in range(rng.choice((2, 3, 4, 5) if large else (1, 1, 2, 2, 3)))
    ]
    if rng.random() < 0.15:
        machines[0].inside, machines[0].own_store = True, False
    ends = rng.uniform(8, 20) if large else rng.uniform(1, 6)
    tasks = _tasks(rng, runs, ends, rng.randint(3, 10) if large else rng.randint(1, 3))
    quotas = {run: _quotas(rng, tasks, run) for run in runs if rng.random() < 0.4}
    kinds = [kind for kind in FAULTS if rng.random() < 0.35] if rng.random() < 0.9 else []
    strikes = rng.randint(4, 16) if large else rng.randint(1, 6)
    faults = [_fault(rng, kinds, ends) for _ in range(strikes if kinds else 0)]
    lease_seconds = rng.choice((5.0, 10.0))
    return Schedule(
        seed=seed,
        attempts=rng.choice((1, 2, 3, 3)),
        lease_seconds=lease_seconds,
        beat_seconds=lease_seconds / rng.choice((3, 3, 5)),
        machines=machines,
        tasks=tasks,
        quotas=quotas,
        faults=sorted(faults, key=lambda fault: fault.at),
        kinds=kinds,
        ends=ends,
        flaky_hosts=rng.choice((0.0, 0.0, 0.1)),
        steers=rng.random() < 0.4,
        runs=runs,
    )


def _tasks(rng: random.Random, runs: list[str], ends: float, count: int) -> list[Task]:
    tasks: list[Task] = []
    poisons = rng.random() < 0.15
    for number in range(count):
        samples = rng.choice((1, 1, 2, 3, 4, 6))
        fields: dict[str, Any] = {
            "runtime": {"backend": rng.choice(LANES)},
            "dispatch_priority": rng.choice((0, 0, 5)),
        }
        if samples > 1 and rng.random() < 0.3:
            fields["early_stop_min_usable_sessions"] = rng.randint(1, samples)
        if rng.random() < 0.3:
            fields |= {"max_lag": rng.randint(0, 1), "on_stale": rng.choice(("mark", "cancel"))}
        request = TaskRequest(
            task_id=f"task-{number}", instruction="-", num_samples=samples, run=rng.choice(runs), **fields
        )
        task = Task(request, at=rng.choice((0.0, rng.uniform(0, ends))), seconds=rng.choice((0.2, 1.0, 3.0)))
        fate = rng.random()
        if poisons and number == 0:
            task.poison = True
            if rng.random() < 0.7:
                request.num_samples, request.early_stop_min_usable_sessions = 1, None
        elif fate < 0.2:
            task.fails = rng.choice((0.2, 0.6, 1.0))
        elif fate < 0.25:
            task.not_runnable = True
        if rng.random() < 0.15:
            task.cancel_at = task.at + rng.uniform(0, 5)
            if rng.random() < 0.5:
                task.seconds = 1e6  # nothing else ends it
        tasks.append(task)
    return tasks


def _quotas(rng: random.Random, tasks: list[Task], run: str) -> Quotas:
    largest = max((task.request.num_samples for task in tasks if task.request.run == run), default=1)
    return Quotas(
        max_running=rng.choice((None, 1, 2)),
        max_queued=rng.choice((None, largest, 2 * largest)),
        batch=rng.choice((None, 1, 2)),
        max_lag=rng.choice((0, 1)),
    )


def _fault(rng: random.Random, kinds: list[str], ends: float) -> Fault:
    return Fault(rng.uniform(0, ends), rng.choice(kinds), rng.choice((0.1, 1.0, 4.0, 9.0)) * rng.uniform(0.5, 1.5))
