"""What a session has used of its limits: turns, sampled tokens, seconds.

    Meter (a session) --owns--> Clock <--hold, mark_busy, release-- CallTimer (a call)

The clock counts what the harness and the engine do for a session. It stands still while the session's calls can't get
on through no fault of its own: they wait while generation is paused, or for a busy engine to begin, or are frozen
midway. As long as one of them is being sampled, the clock runs; and a wait counts as one only after a moment, so that
nobody can stop the clock by asking over and over.
"""

import asyncio
import time
from collections.abc import Hashable
from typing import Literal

from polar.errors import ApiError, ApiErrorKind
from polar.types import UsageTotals

UsedUpLimit = Literal["timeout", "length"]
_MIN_POLL_SECONDS = 0.02  # seconds between two looks at a clock that may stand still
_COUNTED_WAIT_SECONDS = 1.0  # seconds that a call may wait for the engine as part of its session's time


class Clock:
    """Runs from `start` on, but not while anybody holds it, unless somebody is busy."""

    def __init__(self) -> None:
        self._counted = 0.0
        self._since: float | None = None  # when it last began to run
        self._started = False
        self._holders: set[Hashable] = set()
        self._busy: set[Hashable] = set()

    def start(self) -> None:
        self._started = True
        self._update()

    @property
    def is_running(self) -> bool:
        return self._since is not None

    def get_elapsed_seconds(self) -> float:
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._counted + running

    def hold(self, caller: Hashable) -> None:
        self._busy.discard(caller)
        self._holders.add(caller)
        self._update()

    def mark_busy(self, caller: Hashable) -> None:
        self._holders.discard(caller)
        self._busy.add(caller)
        self._update()

    def release(self, caller: Hashable) -> None:
        """Neither holds it nor is busy any more."""
        self._holders.discard(caller)
        self._busy.discard(caller)
        self._update()

    def _update(self) -> None:
        runs = self._started and (bool(self._busy) or not self._holders)
        if runs and self._since is None:
            self._since = time.monotonic()
        elif not runs and self._since is not None:
            self._counted += time.monotonic() - self._since
            self._since = None


class CallTimer:
    """One call's part in its session's clock. A call waits (and holds the clock after a moment) until its engine has
    begun with it; then it is busy, except while it is frozen."""

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
            self._clock.mark_busy(self)  # one that has not begun goes on waiting

    def stop(self) -> None:
        """The call has ended."""
        self._cancel_hold_timer()
        self._clock.release(self)

    def _cancel_hold_timer(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None


_PLATFORM_ERROR_KINDS = frozenset({"engine", "overloaded", "timeout", "internal", "rate_limit"})
"""Kinds of errors that neither the harness nor the model is to blame for. (A session that
has used up its limits gets a rate-limit error too, but that call never begins.)"""


class Meter:
    def __init__(self, *, max_turns: int | None = None, max_tokens: int | None = None) -> None:
        self.clock = Clock()
        self.turns = 0
        self.tokens = 0
        self.usage_totals = UsageTotals()  # by calls that are recorded
        self._failures: dict[str, tuple[ApiErrorKind, str]] = {}  # by exchange; an exception would hold on to its call
        self.recording_error: str | None = None  # the last reply could not be recorded, and so not delivered
        self.has_unrecorded_long_call = (
            False  # the last call did not fit the model's context by far, and was not recorded
        )
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._limit_reached = asyncio.Event()

    def begin_call(self, requested_tokens: int | None) -> int | None:
        """Counts a turn, and returns the most tokens that the call may sample, given what it asked for. Raises ApiError
        where the session has no turn or no token left."""
        if self._max_turns is not None and self.turns >= self._max_turns:
            self._limit_reached.set()
            raise ApiError("rate_limit", f"The session has used up its turns ({self._max_turns}).")
        left = None if self._max_tokens is None else self._max_tokens - self.tokens
        if left is not None and left <= 0:
            self._limit_reached.set()
            raise ApiError("rate_limit", f"The session has used up its tokens ({self._max_tokens}).")
        self.turns += 1
        self.has_unrecorded_long_call = False
        return requested_tokens if left is None else left if requested_tokens is None else min(requested_tokens, left)

    def add_tokens(self, tokens: int) -> None:
        """As they come: several calls at once share what is left."""
        self.tokens += tokens
        if self._max_tokens is not None and self.tokens >= self._max_tokens:
            self._limit_reached.set()

    def record_failure(self, exchange_id: str, error: ApiError) -> None:
        self._failures[exchange_id] = error.kind, str(error)

    def find_platform_failure(self, exchange_id: str) -> str | None:
        """Why a call failed, where that was the platform's doing."""
        kind, message = self._failures.get(exchange_id, (None, None))
        return message if kind in _PLATFORM_ERROR_KINDS else None

    def exceeded_context(self, exchange_id: str) -> bool:
        """Whether a call did not fit the model's context."""
        return self._failures.get(exchange_id, (None, None))[0] == "context_length"

    async def wait_for_timeout(self, seconds: float) -> None:
        """Until the session's clock has counted so many seconds."""
        while (left := seconds - self.clock.get_elapsed_seconds()) > 0:  # noqa: ASYNC110 (the clock may stand still meanwhile)
            await asyncio.sleep(max(left, _MIN_POLL_SECONDS))

    async def wait_until_used_up(self, seconds: float) -> UsedUpLimit:
        """Until the session has used up its turns or tokens, or so many seconds."""
        while (left := seconds - self.clock.get_elapsed_seconds()) > 0:
            try:
                async with asyncio.timeout(max(left, _MIN_POLL_SECONDS)):
                    await self._limit_reached.wait()
                return "length"
            except TimeoutError:
                continue  # unless the clock stood still meanwhile, this was it
        return "timeout"
