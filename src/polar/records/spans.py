"""What results and trajectories both say of sampled tokens: the role of their exchange, where they went, their number.

Imports no array library: programs that only read results have none.
"""

from typing import Literal

from msgspec import Struct

ExchangeRole = Literal["main", "subagent", "compaction", "auxiliary", "retry"]

TRAINABLE_ROLES: frozenset[ExchangeRole] = frozenset(("main", "subagent", "compaction"))
"""Roles that train unless a task says otherwise."""


class Span(Struct, frozen=True, gc=False):
    """Tokens `start` to `stop` of a trace's response were sampled by an exchange, from its sampled token `offset`
    on."""

    exchange_id: str
    start: int
    stop: int
    offset: int


class ExcludedSpan(Struct, frozen=True):
    """Sampled tokens `start` to `stop` (exclusive) of an exchange are in no trace, and why: `undelivered`,
    `role_...`, or the exchange's `untrainable`."""

    exchange_id: str
    start: int
    stop: int
    reason: str


class TokenCounts(Struct, frozen=True):
    computed: int  # tokens that a trainer runs through its model
    unique: int  # tokens of the tree
    trainable: int
