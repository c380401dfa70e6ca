"""Whether work has killed the nodes that died under it, or was only there when something else did.

A node that was told to end (SIGTERM) says so, and its death counts against nobody. Of other deaths nobody knows the
cause: kill -9 by a scheduler looks like kill -9 by an agent. So nodes with such work are compared with nodes without:

    exposure         seconds that nodes lived with it, since the first death that marked it
    control          seconds that nodes without any marked work lived meanwhile
    control_deaths   how many of those died

Where nodes die for reasons of their own, they die as often without the work as with it. It is convicted when its node
dies while it runs alone there, and as many deaths under it would be a coincidence of less than one in a million. Work
under which two nodes have died waits until `control` is three times its `exposure`, so that there is something to
compare with, also where there is one node only: a real killer is convicted after 4 to 8 deaths, fewer the more nodes
live beside it (later where several killers are about, whose first deaths count as control).
"""

from math import exp

from msgspec import Struct

SUSPECT_KILLS = 2
"""Nodes that have died with some work before it is suspected of killing them."""

ISOLATION_KILLS = 3
"""After so many it runs alone at its node: no other work of that node can have killed it then."""

CONTROL_RATIO = 3.0
"""Seconds of control for each of exposure, before a suspect is run again."""

MAX_COINCIDENCE_PROBABILITY = 1e-6


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
        return poisson_tail(self.kills, rate * self.exposure) < MAX_COINCIDENCE_PROBABILITY


def poisson_tail(events: int, expected: float) -> float:
    """Of so many independent events or more, where so many are expected (Poisson)."""
    term = exp(-expected)
    below = 0.0
    for number in range(events):
        below += term
        term *= expected / (number + 1)
    if below < 0.5:
        return 1 - below
    # Summed from here on up: the difference from 1 would be rounding.
    above, number = 0.0, events
    while term > above * 1e-12 and term > 0:
        above += term
        number += 1
        term *= expected / number
    return above
