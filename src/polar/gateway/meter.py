"""Meters a session against its limits: turns, sampled tokens, seconds.

    Meter (a session) --owns--> Clock <--hold, mark_busy, release-- CallTimer (a call)

The clock counts the time that the harness and the engine work for a session. It stands still while the session's calls
are held up by the platform: generation is paused, a busy engine has not begun, or the call is frozen midway. As long as
one call is being sampled, the clock runs. A wait stops the clock only after a moment, so that a harness can't stop it
by sending call after call.
"""

import asyncio
import time
from collections.abc import Hashable
from typing import Literal

from polar.errors import ApiError, ApiErrorKind
from polar.types import UsageTotals

UsedUpLimit = Literal["timeout", "length"]
_MIN_POLL_SECONDS = 0.02  # between two looks at a clock that may stand still
_COUNTED_WAIT_SECONDS = 1.0  # that a call waits for its engine before the session's clock stops


class Clock:
    """Runs from `start` on. Stands still while a caller holds it and no caller is busy."""

    def __init__(self) -> None:
        self._counted_seconds = 0.0
        self._running_since: float | None = None
        self._started = False
        self._holders: set[Hashable] = set()
        self._busy: set[Hashable] = set()

    def start(self) -> None:
        self._started = True
        self._update()

    @property
    def is_running(self) -> bool:
        return self._running_since is not None

    def get_elapsed_seconds(self) -> float:
        running = 0.0 if self._running_since is None else time.monotonic() - self._running_since
        return self._counted_seconds + running

    def hold(self, caller: Hashable) -> None:
        self._busy.discard(caller)
        self._holders.add(caller)
        self._update()

    def mark_busy(self, caller: Hashable) -> None:
        self._holders.discard(caller)
        self._busy.add(caller)
        self._update()

    def release(self, caller: Hashable) -> None:
        """Removes a caller that held the clock or was busy."""
        self._holders.discard(caller)
        self._busy.discard(caller)
        self._update()

    def _update(self) -> None:
        runs = self._started and (bool(self._busy) or not self._holders)
        if runs and self._running_since is None:
            self._running_since = time.monotonic()
        elif not runs and self._running_since is not None:
            self._counted_seconds += time.monotonic() - self._running_since
            self._running_since = None


class CallTimer:
    """Drives the session's clock for one call. A call waits (and holds the clock after a moment) until its engine
    begins; from then on it is busy, except while it is frozen."""

    def __init__(self, clock: Clock) -> None:
        self.has_begun = False
        self._clock = clock
        self._hold_timer: asyncio.TimerHandle | None = None

    def start_waiting(self, *, paused: bool) -> None:
        loop = asyncio.get_running_loop()
        self._hold_timer = loop.call_later(0 if paused else _COUNTED_WAIT_SECONDS, self._clock.hold, self)

    def mark_begun(self, *, frozen: bool) -> None:
        self.has_begun = True
        self._cancel_hold_timer()
        if not frozen:
            self._clock.mark_busy(self)

    def freeze(self) -> None:
        self._clock.hold(self)

    def thaw(self) -> None:
        if self.has_begun:
            self._clock.mark_busy(self)  # a call that has not begun goes on waiting

    def stop(self) -> None:
        """Ends the call's hold on the clock."""
        self._cancel_hold_timer()
        self._clock.release(self)

    def _cancel_hold_timer(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None


_PLATFORM_ERROR_KINDS = frozenset({"engine", "overloaded", "timeout", "internal", "rate_limit"})
"""Kinds of errors that are the platform's fault, not the harness's or the model's. (A session that has used up its
limits gets a rate-limit error as well, but that call never begins.)"""


class Meter:
    def __init__(self, *, max_turns: int | None = None, max_tokens: int | None = None) -> None:
        self.clock = Clock()
        self.turns = 0
        self.tokens = 0
        self.usage_totals = UsageTotals()  # of the recorded calls
        self._failures: dict[str, tuple[ApiErrorKind, str]] = {}  # by exchange; an exception would hold on to its call
        self.recording_error: str | None = None  # the last reply could not be recorded, and so not delivered
        self.has_unrecorded_long_call = (
            False  # the last call did not fit the model's context by far, and was not recorded
        )
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._limit_reached = asyncio.Event()

    def begin_call(self, requested_tokens: int | None) -> int | None:
        """Counts a turn, and returns how many tokens the call may sample at most. Raises ApiError if the session has no
        turns or tokens left."""
        if self._max_turns is not None and self.turns >= self._max_turns:
            self._limit_reached.set()
            raise ApiError("rate_limit", f"The session has used up its turns ({self._max_turns}).")
        remaining = None if self._max_tokens is None else self._max_tokens - self.tokens
        if remaining is not None and remaining <= 0:
            self._limit_reached.set()
            raise ApiError("rate_limit", f"The session has used up its tokens ({self._max_tokens}).")
        self.turns += 1
        self.has_unrecorded_long_call = False
        if remaining is None or requested_tokens is None:
            return requested_tokens if remaining is None else remaining
        return min(requested_tokens, remaining)

    def add_tokens(self, tokens: int) -> None:
        """Counts sampled tokens as they come, since concurrent calls share the session's limit."""
        self.tokens += tokens
        if self._max_tokens is not None and self.tokens >= self._max_tokens:
            self._limit_reached.set()

    def record_failure(self, exchange_id: str, error: ApiError) -> None:
        self._failures[exchange_id] = error.kind, str(error)

    def find_platform_failure(self, exchange_id: str) -> str | None:
        """Returns why a call failed, or None if the platform was not at fault."""
        kind, message = self._failures.get(exchange_id, (None, None))
        return message if kind in _PLATFORM_ERROR_KINDS else None

    def exceeded_context(self, exchange_id: str) -> bool:
        """Whether a call did not fit the model's context."""
        return self._failures.get(exchange_id, (None, None))[0] == "context_length"

    async def wait_for_timeout(self, seconds: float) -> None:
        """Waits until the session's clock has counted so many seconds."""
        while (remaining := seconds - self.clock.get_elapsed_seconds()) > 0:  # noqa: ASYNC110 (the clock may stand still)
            await asyncio.sleep(max(remaining, _MIN_POLL_SECONDS))

    async def wait_until_used_up(self, seconds: float) -> UsedUpLimit:
        """Waits until the session has used up its turns or tokens, or so many seconds; returns which of them."""
        while (remaining := seconds - self.clock.get_elapsed_seconds()) > 0:
            try:
                async with asyncio.timeout(max(remaining, _MIN_POLL_SECONDS)):
                    await self._limit_reached.wait()
                return "length"
            except TimeoutError:
                continue  # the clock may have stood still meanwhile
        return "timeout"
