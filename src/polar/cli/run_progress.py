"""Progress of a run: a live display on a terminal, else lines."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polar.cli.run_tally import RunTally, explain_reward, format_count, format_counts
from polar.node.finished_session import FinishedSession
from polar.node.node import NodeLoad
from polar.records.session import is_suspicious
from polar.telemetry import logs

_RECENT_SESSIONS = 5  # ended sessions that are shown
_RATE_WINDOW_SECONDS = 15.0  # over which the token rate is measured
_BAR_WIDTH = 40


class RunProgress(Protocol):
    interval_seconds: float  # between two updates
    total: int  # expected number of sessions

    def on_session_ended(self, finished: FinishedSession, tally: RunTally) -> None: ...

    def update(self, load: NodeLoad, tally: RunTally) -> None: ...

    def print_message(self, sentence: str) -> None: ...

    def stop(self) -> None:
        """Restores the terminal."""
        ...


@contextlib.contextmanager
def show_progress(console: Console, total: int, *, silent: bool) -> Iterator[RunProgress]:
    """`silent`: shows progress on a terminal only."""
    if console.is_terminal and not console.is_dumb_terminal:
        with LiveProgress(console, total) as picture:
            yield picture
    else:
        yield LineProgress(console, total, silent=silent)


@contextlib.asynccontextmanager
async def poll_load(progress: RunProgress, load: Callable[[], NodeLoad], tally: RunTally) -> AsyncIterator[None]:
    """Updates the progress with the node's load at regular intervals."""

    async def poll() -> None:
        while True:
            progress.update(load(), tally)
            await asyncio.sleep(progress.interval_seconds)

    polling = asyncio.ensure_future(poll())
    try:
        yield
    finally:
        polling.cancel()
        await asyncio.wait({polling})
        if not polling.cancelled():
            polling.result()


class TokenRate:
    """Sampled tokens a second, over a sliding window."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, tokens: int, now: float) -> float:
        self._samples.append((now, tokens))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _RATE_WINDOW_SECONDS:
            self._samples.popleft()
        then, before = self._samples[0]
        return (tokens - before) / (now - then) if now > then else 0.0


class LineProgress:
    """Progress as lines, for files and pipes."""

    interval_seconds = 10.0

    def __init__(self, console: Console, total: int, *, silent: bool) -> None:
        self._console = console
        self.total = total
        self._silent = silent
        self._rate = TokenRate()

    def on_session_ended(self, finished: FinishedSession, tally: RunTally) -> None:
        self._print(f"{tally.sessions}/{self.total}  {describe_session(finished)} ({finished.session_id})")

    def update(self, load: NodeLoad, tally: RunTally) -> None:
        speed = self._rate.update(load.tokens, time.monotonic())
        words = [describe_stages(load, tally, self.total), describe_rewards(tally), describe_engine(load, speed)]
        self._print("; ".join(filter(None, words)))

    def print_message(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        pass

    def _print(self, line: str) -> None:
        if not self._silent:
            self.print_message(line)


class LiveProgress:
    """A live display, for terminals. Log records are printed above it."""

    interval_seconds = 0.25

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self.total = total
        self._began = time.monotonic()
        self._rate = TokenRate()
        self._recent: deque[FinishedSession] = deque(maxlen=_RECENT_SESSIONS)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._handlers: list[logging.Handler] = []

    def __enter__(self) -> "LiveProgress":
        root = logging.getLogger()
        self._handlers, root.handlers = root.handlers, [_LiveLogHandler(self._console, root.handlers)]
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        logging.getLogger().handlers = self._handlers

    def on_session_ended(self, finished: FinishedSession, tally: RunTally) -> None:  # noqa: ARG002
        self._recent.append(finished)

    def update(self, load: NodeLoad, tally: RunTally) -> None:
        self._live.update(self.render(load, tally, time.monotonic()), refresh=True)

    def print_message(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, markup=False)

    def stop(self) -> None:
        self._live.stop()

    def render(self, load: NodeLoad, tally: RunTally, now: float) -> Group:
        bar = Table.grid(padding=(0, 2))
        minutes, seconds = divmod(int(now - self._began), 60)
        done = f"{tally.sessions}/{self.total}"
        bar.add_row(ProgressBar(self.total, tally.sessions, width=_BAR_WIDTH), done, f"{minutes}:{seconds:02}")
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", min_width=8)
        rows.add_column(overflow="ellipsis", no_wrap=True)
        rows.add_row("sessions", Text(describe_stages(load, tally, self.total)))
        rows.add_row("reward", Text(describe_rewards(tally) or "none yet"))
        rows.add_row("engine", Text(describe_engine(load, self._rate.update(load.tokens, now))))
        for number, finished in enumerate(self._recent):
            rows.add_row("" if number else "ended", Text(describe_session(finished), "dim"))
        return Group(bar, rows)


class _LiveLogHandler(logging.Handler):
    """Prints log records above the live display, in their configured format."""

    def __init__(self, console: Console, handlers: list[logging.Handler]) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(logs.TEXT_FORMAT))
        for handler in handlers:
            if isinstance(handler, logs.StderrHandler):
                self.setFormatter(handler.formatter)
                self.filters = handler.filters
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(self.format(record), highlight=False, markup=False)
        except Exception:  # noqa: BLE001 - as logging's own handlers do: a message that cannot be formatted stops nobody
            self.handleError(record)


def describe_stages(load: NodeLoad, tally: RunTally, total: int) -> str:
    inside = {"init": load.init, "ready": load.ready, "run": load.run, "postrun": load.postrun}
    waiting = total - tally.sessions - sum(inside.values())
    counts = {"waiting": max(waiting, 0), **inside}
    return ", ".join(f"{count} {stage}" for stage, count in counts.items()) + f", {tally.sessions} of {total} done"


def describe_rewards(tally: RunTally) -> str:
    mean = tally.mean_reward
    words = [] if mean is None else [f"mean reward {mean:.3g}", f"{tally.solved} of {tally.rewarded} solved"]
    return ", ".join([*words, *([f"without a reward: {format_counts(tally.reasons)}"] if tally.reasons else [])])


def describe_engine(load: NodeLoad, speed: float) -> str:
    words = [f"{speed:,.0f} tokens/s", f"{format_count(load.calls, 'call')} at the engine"]
    if load.held:
        words.append(f"{load.held} held")
    if load.paused:
        words.append("paused")
    return ", ".join(words)


def describe_session(finished: FinishedSession) -> str:
    """Describes a finished session in a line."""
    verdict = finished.verdict
    if verdict.reward is not None:
        explanation = explain_reward(verdict)
        earned = f"reward {verdict.reward:g}" + (f" ({explanation})" if explanation else "")
    elif verdict.reason is not None:
        earned = f"no reward ({verdict.reason})"
    else:
        earned = "not evaluated"
    if is_suspicious(verdict.evidence):
        earned += ", suspicious"
    words = [earned, format_count(finished.turns, "turn"), format_count(finished.tokens, "token")]
    if finished.outcome is not None:
        words.append(f"{finished.outcome.seconds:.1f} s")
        if finished.outcome.end_reason != "finished":
            words.append(f"ended by {finished.outcome.end_reason}")
    return f"{finished.task_id} #{finished.sample}: {', '.join(words)}"
