"""Which work a node gets next, and whether work killed the nodes that died under it.

The most urgent work goes first, whatever lane it is in. Work under which nodes have died shares a node with ever less
other work, and in the end runs alone.

A node that was told to end (SIGTERM) says so, and its death counts against nobody. Of other deaths nobody knows the
cause: kill -9 by a scheduler looks like kill -9 by an agent. So nodes with such work are compared with nodes without:

    exposure         seconds that nodes lived with it, since the first death that marked it
    control          seconds that nodes without any marked work lived meanwhile
    control_deaths   how many of those died

Where nodes die for reasons of their own, they die as often without the work as with it. Work is convicted when its node
dies while it runs alone there, and as many deaths under it would be a coincidence of less than one in a million. Work
under which two nodes have died waits until `control` is three times its `exposure`, so that there is something to
compare with, also where there is one node only: a real killer is convicted after 4 to 8 deaths, fewer the more nodes
live beside it (later where several killers are about, whose first deaths count as control).
"""

from collections.abc import Callable, Collection, Sequence
from math import exp

from msgspec import Struct

from polar.rollout.queue.records import Lane, LeaseAllowance, LeaseCandidate

SUSPECT_KILLS = 2
"""Nodes that have died with some work before it is suspected of killing them."""

ISOLATION_KILLS = 3
"""After so many it runs alone at its node: no other work of that node can have killed it then."""

CONTROL_RATIO = 3.0
"""Seconds of control for each of exposure, before a suspect is run again."""

MAX_COINCIDENCE_PROBABILITY = 1e-6

ANY_KILLS = 1 << 31
_LOOKAHEAD = 1000  # of a lane that are looked through

FetchCandidates = Callable[[Lane, int, int], list[LeaseCandidate]]
"""The first so many of a lane under which no more than so many nodes have died."""


def select_work(
    fetch_candidates: FetchCandidates,
    allowances: Sequence[LeaseAllowance],
    room: int,
    slots: int,
    held_kills: Collection[int],
    unrunnable: Collection[tuple[str, str]] = (),
) -> list[tuple[LeaseCandidate, LeaseAllowance]]:
    """The most urgent first, whatever lane it is in; of equally urgent ones, those of the least busy run.

    `held_kills` says, for each lease that the node has, how many nodes have died under that work. `unrunnable` names
    tasks, with their runs, that the node can't run."""
    marked = [kills for kills in held_kills if kills]
    if any(kills >= ISOLATION_KILLS for kills in marked):
        return []
    heads: list[tuple[LeaseCandidate, LeaseAllowance]] = []
    for allowance in allowances:
        limit = min(room, allowance.max_sessions)
        if limit <= 0:
            continue
        limit += _LOOKAHEAD * bool(unrunnable)  # what the node can run may stand behind what it can't
        candidates = fetch_candidates(allowance.lane, limit, ANY_KILLS)
        if any(candidate.kills for candidate in candidates):  # they may not be let in
            for most_kills in (ISOLATION_KILLS - 1, SUSPECT_KILLS - 1, 0):
                candidates += fetch_candidates(allowance.lane, limit, most_kills)
        heads += [(candidate, allowance) for candidate in candidates]
    selected: dict[int, tuple[LeaseCandidate, LeaseAllowance]] = {}
    remaining = {allowance.lane.run: allowance.max_sessions for allowance in allowances}
    for candidate, allowance in sorted(heads, key=lambda entry: (entry[0].rank, entry[1].running, entry[0].work_id)):
        if len(selected) >= room:
            break
        run = allowance.lane.run
        if candidate.work_id in selected or remaining[run] <= 0 or (run, candidate.task_id) in unrunnable:
            continue
        if candidate.kills >= ISOLATION_KILLS:
            if not held_kills and not selected:
                return [(candidate, allowance)]
            if allowance.is_isolation_node:
                break
            continue
        if candidate.kills:
            if not may_share_node([*marked, candidate.kills], slots):
                continue
            marked.append(candidate.kills)
        remaining[run] -= 1
        selected[candidate.work_id] = candidate, allowance
    return list(selected.values())


def may_share_node(kills: Sequence[int], slots: int) -> bool:
    """Whether these may run at a node at the same time, under each of which so many nodes have died. Where one of them
    is a suspect, ever fewer, so that those who were only nearby are soon cleared."""
    max_kills = max(kills)
    return max_kills < SUSPECT_KILLS or len(kills) <= max(1, slots >> 2 * (max_kills - SUSPECT_KILLS + 1))


class SuspectRecord(Struct):
    """What is known against some work whose node has died, while it was alone there."""

    kills: int  # deaths without this one: the first only marked it
    exposure: float
    control: float
    control_deaths: int

    @property
    def is_proven(self) -> bool:
        if self.kills < ISOLATION_KILLS or self.control <= 0:
            return False
        rate = (self.control_deaths + 1) / self.control  # one more than were seen: rates of 0 are not known
        return compute_poisson_tail(self.kills, rate * self.exposure) < MAX_COINCIDENCE_PROBABILITY


def compute_poisson_tail(events: int, expected: float) -> float:
    """Of so many independent events or more, where so many are expected (Poisson)."""
    term = exp(-expected)
    lower = 0.0
    for number in range(events):
        lower += term
        term *= expected / (number + 1)
    if lower < 0.5:
        return 1 - lower
    # Summed from here on up: the difference from 1 would be rounding.
    upper, number = 0.0, events
    while term > upper * 1e-12 and term > 0:
        upper += term
        number += 1
        term *= expected / number
    return upper
