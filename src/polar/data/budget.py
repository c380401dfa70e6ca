"""What a collection may use: tokens, money, seconds. Used up, it lets nothing more begin; what runs goes on to its end,
so that nothing that was paid for is thrown away."""

import time
from collections.abc import Callable

from msgspec import Struct

from polar.config import PriceSettings
from polar.errors import ConfigError
from polar.types import UsageTotals

_TOKENS_PER_PRICE = 1_000_000


def compute_cost(used: UsageTotals, price: PriceSettings) -> float:
    cached = price.prompt if price.cached is None else price.cached
    new = used.prompt - used.cached
    return (new * price.prompt + used.cached * cached + used.sampled * price.sampled) / _TOKENS_PER_PRICE


class Budget(Struct, frozen=True):
    """None: as much as it takes. Tokens and money count for all sessions of the collection, those of runs before
    included; seconds are those of this run."""

    tokens: int | None = None  # of prompts, and sampled ones
    cost: float | None = None  # in the currency of the price
    seconds: float | None = None
    price: PriceSettings | None = None

    @property
    def is_limited(self) -> bool:
        return self.tokens is not None or self.cost is not None or self.seconds is not None

    def __post_init__(self) -> None:
        if self.cost is not None and self.price is None:
            raise ConfigError(
                "A budget of money needs to know what tokens cost: --price PROMPT SAMPLED, or [engine.price]."
            )


NO_LIMIT = Budget()


class Spending:
    """A budget, and what is gone of it."""

    def __init__(
        self, budget: Budget, measure_used: Callable[[], UsageTotals], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`used`: by the sessions of this run so far."""
        self._budget = budget
        self._measure_used = measure_used
        self._used_earlier = UsageTotals()
        self._clock = clock
        self._started_at = clock()

    def add_earlier_usage(self, used: UsageTotals) -> None:
        """What a session of an earlier run used."""
        self._used_earlier += used

    @property
    def used(self) -> UsageTotals:
        return self._used_earlier + self._measure_used()

    @property
    def cost(self) -> float | None:
        return None if self._budget.price is None else compute_cost(self.used, self._budget.price)

    def exhausted_limit(self) -> str | None:
        """In words, what is; None where more may begin. Raises ConfigError where nobody can tell."""
        budget = self._budget
        if budget.seconds is not None and self._clock() - self._started_at >= budget.seconds:
            return f"{budget.seconds:g} seconds"
        if budget.tokens is None and budget.cost is None:
            return None
        used = self.used
        if used.uncounted:
            raise ConfigError(
                "The engine does not tell how many tokens a call takes, so a budget of tokens or money can't be kept: "
                "leave it out (--budget-seconds works), or use an engine that reports `usage`."
            )
        if budget.tokens is not None and used.prompt + used.sampled >= budget.tokens:
            return f"{budget.tokens:,} tokens"
        if budget.cost is not None and (spent := self.cost) is not None and spent >= budget.cost:
            return f"a cost of {budget.cost:g}"
        return None
