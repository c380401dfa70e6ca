"""Machines are taken away from outside, 20 times in 200 sessions: nobody's work is to blame, and all of it ends."""

import msgspec
import pytest

from polar.records.task import TaskRequest
from polar.rollout.protocol import SessionOutcome
from tests.simulation.schedule import Fault, Machine, Schedule, Task
from tests.simulation.world import Parts, World

_SECONDS = 25.0
"""In which machines are preempted: about as long as the sessions take."""


def schedule(seed: int, kinds: list[str], machines: int, *, killer: bool = False) -> Schedule:
    tasks = [
        Task(
            TaskRequest(task_id=f"task-{number}", instruction="-", num_samples=5, runtime={"backend": "one"}),
            at=0.0,
            seconds=2.0,
        )
        for number in range(40)
    ]
    if killer:
        request = TaskRequest(task_id="killer", instruction="-", dispatch_priority=5, runtime={"backend": "one"})
        tasks.append(Task(request, at=0.0, seconds=1.0, poison=True))
    faults = [
        Fault(at=_SECONDS * number / 20, kind=kinds[number % len(kinds)], seconds=1.0 + number % 5)
        for number in range(20)
    ]
    return Schedule(
        seed=seed,
        attempts=1,
        lease_seconds=5.0,
        beat_seconds=1.0,
        machines=[Machine(f"node-{number}", ["one"], 4) for number in range(machines)],
        tasks=tasks,
        quotas={},
        faults=faults,
        kinds=kinds,
        ends=_SECONDS,
        flaky_hosts=0.0,
        steers=False,
        runs=["default"],
    )


def reasons(world: World) -> dict[str, int]:
    found: dict[str, int] = {}
    for work in world.audit.work.values():
        reason = str(msgspec.json.decode(work.summary or "", type=SessionOutcome).reason)
        found[reason] = found.get(reason, 0) + 1
    return found


@pytest.mark.parametrize(
    "kinds",
    [
        ["kill_node"],
        pytest.param(["preempt_node"], marks=pytest.mark.slow),
        pytest.param(["kill_node", "preempt_node", "cut_off"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("machines", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_nobody_is_blamed_for_preempted_machines(kinds: list[str], machines: int) -> None:
    world = World(schedule(0, kinds, machines), Parts())
    world.run()
    assert reasons(world) == {"None": 200}


@pytest.mark.parametrize("machines", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_real_killer_is_found_beside_preempted_machines(machines: int) -> None:
    world = World(schedule(0, ["kill_node"], machines, killer=True), Parts())
    world.run()
    assert reasons(world) == {"None": 200, "node_killer": 1}
    (killer,) = (work for work in world.audit.work.values() if work.task_id == "killer")
    assert killer.fence <= 16
