"""Which replica a call goes to.

A session stays where its prefix is cached. One without a place gets it by rendezvous hashing: every replica has its
turn in an order that depends on the session's group alone. So sessions of one task, which begin with the same prompt,
meet at one replica, at every gateway and also after a restart; and a replica that comes or goes changes nothing for
groups whose first choice is another.

Load comes first: a replica with clearly more calls than the mean takes no newcomers, and what would go there goes to
the next in its order. A session leaves its place only at a much higher load, and takes its call's load along: so those
leave that are too many, not all; they go to different places; and they stay there, since a place that took them has a
long way to go until they would have to leave it again.
"""

import hashlib
from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

_NEWCOMER_LOAD_FACTOR = 1.25  # times the mean of calls: up to here a replica takes newcomers
_RESIDENT_LOAD_FACTOR = 1.5  # times the mean: up to here it keeps those that it has
_SLACK_CALLS = 16  # calls above the mean that no engine minds, and for which no session gives up its cache


class RoutableReplica(Protocol):
    """What is asked of a replica."""

    @property
    def url(self) -> str: ...

    @property
    def running(self) -> Collection[object]: ...


ReplicaT = TypeVar("ReplicaT", bound=RoutableReplica)


def choose_replica(group: str, home: ReplicaT | None, replicas: Sequence[ReplicaT], max_calls: int) -> ReplicaT:
    """One of `places`, of which there must be some. `home` is where the session was last; `most` is how many calls one
    place should get at most. Where no place has room, the least busy one is taken."""
    mean = (1 + sum(len(place.running) for place in replicas)) / len(replicas)
    if (
        home is not None
        and home in replicas
        and len(home.running) < min(max_calls, max(_RESIDENT_LOAD_FACTOR * mean, mean + _SLACK_CALLS))
    ):
        return home
    ordered = rank_replicas(group, replicas)
    room = min(max_calls, max(1, int(_NEWCOMER_LOAD_FACTOR * mean)))
    return next(
        (place for place in ordered if len(place.running) < room), min(ordered, key=lambda place: len(place.running))
    )


def rank_replicas(group: str, replicas: Sequence[ReplicaT]) -> list[ReplicaT]:
    """The places as a group prefers them."""
    return sorted(replicas, key=lambda place: _rendezvous_hash(group, place.url), reverse=True)


def _rendezvous_hash(group: str, url: str) -> bytes:
    return hashlib.blake2b(f"{group}\0{url}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
