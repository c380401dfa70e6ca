"""Selects the work that a node gets next, and decides whether work has killed the nodes that died under it.

The most urgent work goes first, whatever its lane. Work under which nodes have died shares a node with ever less other
work, and finally runs alone.

A node that was asked to stop (SIGTERM) reports that, and its death counts against no work. The cause of other deaths is
unknown: kill -9 by a scheduler looks like kill -9 by an agent. So nodes with suspect work are compared with others:

    exposure         seconds that nodes lived with the work, since the first death that marked it
    control          seconds that nodes without suspect work lived meanwhile
    control_deaths   how many of those died

Where nodes die for other reasons, they die as often without the work as with it. Work is convicted when its node dies
while it runs alone there, and the probability of so many deaths by coincidence is below one in a million. Work under
which two nodes have died waits until `control` is three times its `exposure`, so that there is a basis for comparison
even with a single node: a real killer is convicted after 4 to 8 deaths, fewer the more nodes there are (later if there
are several killers, whose first deaths count as control).
"""

from collections.abc import Callable, Collection, Sequence
from math import exp

from msgspec import Struct

from polar.rollout.queue.records import Lane, LeaseAllowance, LeaseCandidate

SUSPECT_KILLS = 2
"""Deaths of nodes after which work is suspected."""

ISOLATION_KILLS = 3
"""Deaths after which work runs alone on its node, so that no other work can have killed the node."""

CONTROL_RATIO = 3.0
"""Seconds of control for each second of exposure, before suspect work runs again."""

MAX_COINCIDENCE_PROBABILITY = 1e-6

ANY_KILLS = 1 << 31
_LOOKAHEAD = 1000  # candidates of a lane that are searched

FetchCandidates = Callable[[Lane, int, int], list[LeaseCandidate]]
"""Called with a lane, a limit and the largest number of deaths; returns the lane's next candidates."""


def select_work(
    fetch_candidates: FetchCandidates,
    allowances: Sequence[LeaseAllowance],
    room: int,
    slots: int,
    held_kills: Collection[int],
    unrunnable: Collection[tuple[str, str]] = (),
) -> list[tuple[LeaseCandidate, LeaseAllowance]]:
    """Selects the most urgent work, whatever its lane; among equally urgent work, that of the least busy run.

    `held_kills` are, for each lease of the node, the deaths under that work. `unrunnable` are tasks, with their runs,
    that the node can't run."""
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
    """Whether work with these numbers of deaths may run on one node at the same time. Suspect work shares the node with
    ever less other work, so that innocent work is soon cleared."""
    max_kills = max(kills)
    return max_kills < SUSPECT_KILLS or len(kills) <= max(1, slots >> 2 * (max_kills - SUSPECT_KILLS + 1))


class SuspectRecord(Struct):
    """The evidence against work that was alone on a node that died."""

    kills: int  # deaths without the first one, which only marked the work
    exposure: float
    control: float
    control_deaths: int

    @property
    def is_proven(self) -> bool:
        if self.kills < ISOLATION_KILLS or self.control <= 0:
            return False
        rate = (self.control_deaths + 1) / self.control  # one more than observed, so that the rate is never 0
        return compute_poisson_tail(self.kills, rate * self.exposure) < MAX_COINCIDENCE_PROBABILITY


def compute_poisson_tail(events: int, expected: float) -> float:
    """The probability of at least `events` independent events where `expected` are expected (Poisson)."""
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
