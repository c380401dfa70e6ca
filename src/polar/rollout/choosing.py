"""Which work a node gets next."""

from collections.abc import Callable, Collection, Sequence

from polar.rollout.blame import LONER, SUSPECT
from polar.rollout.records import Allowance, Head, Lane

ANY = 1 << 31
_BEHIND = 1000  # of a lane that are looked through

Heads = Callable[[Lane, int, int], list[Head]]
"""The first so many of a lane under which no more than so many nodes have died."""


def choose(
    heads_of: Heads,
    allowances: Sequence[Allowance],
    room: int,
    slots: int,
    has: Collection[int],
    unfit: Collection[tuple[str, str]] = (),
) -> list[tuple[Head, Allowance]]:
    """The most urgent first, whatever lane it is in; of equally urgent ones, those of the least busy run. `has`: for
    each lease that the node has, how many nodes have died under that work. `unfit`: tasks, with their runs, that the
    node can't run."""
    marked = [kills for kills in has if kills]
    if any(kills >= LONER for kills in marked):
        return []
    heads: list[tuple[Head, Allowance]] = []
    for allowance in allowances:
        limit = min(room, allowance.most)
        if limit <= 0:
            continue
        limit += _BEHIND * bool(unfit)  # what the node can run may stand behind what it can't
        found = heads_of(allowance.lane, limit, ANY)
        if any(head.kills for head in found):  # they may not be let in
            for most_kills in (LONER - 1, SUSPECT - 1, 0):
                found += heads_of(allowance.lane, limit, most_kills)
        heads += [(head, allowance) for head in found]
    chosen: dict[int, tuple[Head, Allowance]] = {}
    left = {allowance.lane.run: allowance.most for allowance in allowances}
    for head, allowance in sorted(heads, key=lambda one: (one[0].rank, one[1].busy, one[0].work_id)):
        if len(chosen) >= room:
            break
        run = allowance.lane.run
        if head.work_id in chosen or left[run] <= 0 or (run, head.task_id) in unfit:
            continue
        if head.kills >= LONER:
            if not has and not chosen:
                return [(head, allowance)]
            if allowance.isolates:
                break
            continue
        if head.kills:
            if not may_be_together([*marked, head.kills], slots):
                continue
            marked.append(head.kills)
        left[run] -= 1
        chosen[head.work_id] = head, allowance
    return list(chosen.values())


def may_be_together(marked: Sequence[int], slots: int) -> bool:
    """Whether these may run at a node at the same time, under each of which so many nodes have died. Where one of them
    is a suspect, ever fewer, so that those who were only nearby are soon cleared."""
    most = max(marked)
    return most < SUSPECT or len(marked) <= max(1, slots >> 2 * (most - SUSPECT + 1))
