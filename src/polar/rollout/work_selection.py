"""Which work a node gets next."""

from collections.abc import Callable, Collection, Sequence

from polar.rollout.killer_detection import ISOLATION_KILLS, SUSPECT_KILLS
from polar.rollout.records import Lane, LeaseAllowance, LeaseCandidate

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
    """The most urgent first, whatever lane it is in; of equally urgent ones, those of the least busy run. `has`: for
    each lease that the node has, how many nodes have died under that work. `unfit`: tasks, with their runs, that the
    node can't run."""
    marked = [kills for kills in held_kills if kills]
    if any(kills >= ISOLATION_KILLS for kills in marked):
        return []
    heads: list[tuple[LeaseCandidate, LeaseAllowance]] = []
    for allowance in allowances:
        limit = min(room, allowance.max_sessions)
        if limit <= 0:
            continue
        limit += _LOOKAHEAD * bool(unrunnable)  # what the node can run may stand behind what it can't
        found = fetch_candidates(allowance.lane, limit, ANY_KILLS)
        if any(head.kills for head in found):  # they may not be let in
            for most_kills in (ISOLATION_KILLS - 1, SUSPECT_KILLS - 1, 0):
                found += fetch_candidates(allowance.lane, limit, most_kills)
        heads += [(head, allowance) for head in found]
    chosen: dict[int, tuple[LeaseCandidate, LeaseAllowance]] = {}
    left = {allowance.lane.run: allowance.max_sessions for allowance in allowances}
    for head, allowance in sorted(heads, key=lambda one: (one[0].rank, one[1].running, one[0].work_id)):
        if len(chosen) >= room:
            break
        run = allowance.lane.run
        if head.work_id in chosen or left[run] <= 0 or (run, head.task_id) in unrunnable:
            continue
        if head.kills >= ISOLATION_KILLS:
            if not held_kills and not chosen:
                return [(head, allowance)]
            if allowance.is_isolation_node:
                break
            continue
        if head.kills:
            if not may_share_node([*marked, head.kills], slots):
                continue
            marked.append(head.kills)
        left[run] -= 1
        chosen[head.work_id] = head, allowance
    return list(chosen.values())


def may_share_node(kills: Sequence[int], slots: int) -> bool:
    """Whether these may run at a node at the same time, under each of which so many nodes have died. Where one of them
    is a suspect, ever fewer, so that those who were only nearby are soon cleared."""
    most = max(kills)
    return most < SUSPECT_KILLS or len(kills) <= max(1, slots >> 2 * (most - SUSPECT_KILLS + 1))
