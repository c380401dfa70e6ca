"""How far each exchange of a session repeats the tokens of an earlier one: found by comparing them, never believed.

A turn's prompt mostly begins with the whole turn before it, which takes one comparison to find out, at the speed of
memory. The repeated tokens need not be looked at again: neither to hash them, nor to see whether they are tokens at
all, nor to compare them with a trace that was compared with the turn before. So a session of k turns over n tokens is
checked with k comparisons of up to n tokens, instead of k hashes.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import numpy as np

from polar.records.exchange import Exchange, TokenIds

_NO_IDS: TokenIds = np.empty(0, np.int32)
_MAX_LINKS = 8
"""Links that are followed from one exchange to another before they are compared directly."""


class ExchangeContext:
    """An exchange's prompt and sampled tokens. Its first `shared` tokens are those of `base`."""

    __slots__ = ("base", "num_shared", "prompt", "prompt_hash", "sampled")

    def __init__(self, prompt: TokenIds, sampled: TokenIds, base: "ExchangeContext | None", shared: int) -> None:
        self.prompt = prompt
        self.sampled = sampled
        self.base = base
        self.num_shared = shared
        self.prompt_hash: Any = None  # the state of a SHA-256 over the prompt, once somebody has asked for it

    def __len__(self) -> int:
        return len(self.prompt) + len(self.sampled)

    def count_shared_prefix(self, other: "ExchangeContext") -> int:
        """How many of its first tokens are known to be the first ones of `other`. 0 where nobody has compared them."""
        shared, at = len(self), self
        for _ in range(_MAX_LINKS):
            if at is other:
                return shared
            if at.base is None:
                return 0
            shared, at = min(shared, at.num_shared), at.base
        return 0

    def digest_prompt(self) -> bytes:
        """The SHA-256 of the prompt's ids, continued from that of an earlier prompt which it begins with."""
        shared, at = self.num_shared, self.base
        while at is not None and len(at.prompt) > shared:
            shared, at = min(shared, at.num_shared), at.base
        if at is None or at.prompt_hash is None:
            self.prompt_hash = sha256(_to_little_endian(self.prompt))
        else:
            self.prompt_hash = at.prompt_hash.copy()
            self.prompt_hash.update(_to_little_endian(self.prompt[len(at.prompt) :]))
        digest: bytes = self.prompt_hash.digest()
        return digest


class ContextIndex:
    """Of a session's exchanges, by id. They are added in the order of their `seq`."""

    def __init__(self, exchanges: Iterable[Exchange] = ()) -> None:
        self._known: dict[str, ExchangeContext] = {}
        self._last: ExchangeContext | None = None
        for exchange in sorted(exchanges, key=lambda exchange: exchange.seq):
            self.add(exchange)

    def add(self, exchange: Exchange) -> ExchangeContext:
        """Its `parent` is only a hint which exchange to compare it with."""
        prompt = _NO_IDS if exchange.prompt_ids is None else exchange.prompt_ids
        sampled = _NO_IDS if exchange.sampled_ids is None else exchange.sampled_ids
        base = self._known.get(exchange.parent) if exchange.parent is not None else None
        base = base or self._last
        shared = 0 if base is None else _count_shared_with_base(prompt, base)
        context = ExchangeContext(prompt, sampled, base, shared)
        self._known[exchange.exchange_id] = self._last = context
        return context

    def __getitem__(self, exchange_id: str) -> ExchangeContext:
        return self._known[exchange_id]

    def __contains__(self, exchange_id: object) -> bool:
        return exchange_id in self._known


def _count_shared_with_base(prompt: TokenIds, base: ExchangeContext) -> int:
    """How many of the prompt's first tokens are those of `base`."""
    shared = _count_common_prefix(prompt, base.prompt)
    if shared == len(base.prompt):
        shared += _count_common_prefix(prompt[shared:], base.sampled)
    return shared


def _count_common_prefix(a: TokenIds, b: TokenIds) -> int:
    """The length of the longest common prefix."""
    length = min(len(a), len(b))
    if not length:
        return 0
    unequal = a[:length] != b[:length]
    at = int(unequal.argmax())
    return at if unequal[at] else length


def _to_little_endian(ids: TokenIds) -> Any:
    return np.ascontiguousarray(ids, "<i4")
