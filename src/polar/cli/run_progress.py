"""What is seen of a run while it goes on: a picture that is drawn again and again, on a terminal; else lines."""

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

from polar.cli.run_tally import Tally, count, listed, why
from polar.node.finished import Finished
from polar.node.node import Load
from polar.store.base import is_suspicious
from polar.telemetry import logs

_LAST = 5  # sessions that ended last
_WINDOW = 15.0  # seconds that the speed is taken over
_BAR = 40


class Progress(Protocol):
    every: float  # seconds between two looks
    total: int  # sessions that there will be, as far as is known

    def ended(self, finished: Finished, tally: Tally) -> None: ...

    def look(self, load: Load, tally: Tally) -> None: ...

    def say(self, sentence: str) -> None: ...

    def stop(self) -> None:
        """Leaves the terminal as it was."""
        ...


@contextlib.contextmanager
def progress(console: Console, total: int, *, silent: bool) -> Iterator[Progress]:
    """`silent`: on a terminal only."""
    if console.is_terminal and not console.is_dumb_terminal:
        with Picture(console, total) as picture:
            yield picture
    else:
        yield Lines(console, total, silent=silent)


@contextlib.asynccontextmanager
async def followed(shown: Progress, load: Callable[[], Load], tally: Tally) -> AsyncIterator[None]:
    """Looks at the node again and again, meanwhile."""

    async def follow() -> None:
        while True:
            shown.look(load(), tally)
            await asyncio.sleep(shown.every)

    following = asyncio.ensure_future(follow())
    try:
        yield
    finally:
        following.cancel()
        await asyncio.wait({following})
        if not following.cancelled():
            following.result()


class Speed:
    """Sampled tokens a second, over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def at(self, tokens: int, now: float) -> float:
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW:
            self._seen.popleft()
        then, before = self._seen[0]
        return (tokens - before) / (now - then) if now > then else 0.0


class Lines:
    """For files and pipes."""

    every = 10.0

    def __init__(self, console: Console, total: int, *, silent: bool) -> None:
        self._console = console
        self.total = total
        self._silent = silent
        self._speed = Speed()

    def ended(self, finished: Finished, tally: Tally) -> None:
        self._print(f"{tally.sessions}/{self.total}  {in_words(finished)} ({finished.session_id})")

    def look(self, load: Load, tally: Tally) -> None:
        speed = self._speed.at(load.tokens, time.monotonic())
        words = [stages(load, tally, self.total), earned(tally), engine(load, speed)]
        self._print("; ".join(filter(None, words)))

    def say(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        pass

    def _print(self, line: str) -> None:
        if not self._silent:
            self.say(line)


class Picture:
    """For terminals. What is logged meanwhile is written above it."""

    every = 0.25

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self.total = total
        self._began = time.monotonic()
        self._speed = Speed()
        self._last: deque[Finished] = deque(maxlen=_LAST)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._handlers: list[logging.Handler] = []

    def __enter__(self) -> "Picture":
        root = logging.getLogger()
        self._handlers, root.handlers = root.handlers, [_Above(self._console, root.handlers)]
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        logging.getLogger().handlers = self._handlers

    def ended(self, finished: Finished, tally: Tally) -> None:  # noqa: ARG002
        self._last.append(finished)

    def look(self, load: Load, tally: Tally) -> None:
        self._live.update(self.drawn(load, tally, time.monotonic()), refresh=True)

    def say(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, markup=False)

    def stop(self) -> None:
        self._live.stop()

    def drawn(self, load: Load, tally: Tally, now: float) -> Group:
        bar = Table.grid(padding=(0, 2))
        minutes, seconds = divmod(int(now - self._began), 60)
        done = f"{tally.sessions}/{self.total}"
        bar.add_row(ProgressBar(self.total, tally.sessions, width=_BAR), done, f"{minutes}:{seconds:02}")
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", min_width=8)
        rows.add_column(overflow="ellipsis", no_wrap=True)
        rows.add_row("sessions", Text(stages(load, tally, self.total)))
        rows.add_row("reward", Text(earned(tally) or "none yet"))
        rows.add_row("engine", Text(engine(load, self._speed.at(load.tokens, now))))
        for number, finished in enumerate(self._last):
            rows.add_row("" if number else "ended", Text(in_words(finished), "dim"))
        return Group(bar, rows)


class _Above(logging.Handler):
    """What is logged, above the picture, in the form that it would have had without it."""

    def __init__(self, console: Console, handlers: list[logging.Handler]) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(logs.TEXT))
        for handler in handlers:
            if isinstance(handler, logs.Stderr):
                self.setFormatter(handler.formatter)
                self.filters = handler.filters
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(self.format(record), highlight=False, markup=False)
        except Exception:  # noqa: BLE001 - as logging's own handlers do: a message that cannot be formatted stops nobody
            self.handleError(record)


def stages(load: Load, tally: Tally, total: int) -> str:
    inside = {"init": load.init, "ready": load.ready, "run": load.run, "postrun": load.postrun}
    waiting = total - tally.sessions - sum(inside.values())
    counts = {"waiting": max(waiting, 0), **inside}
    return ", ".join(f"{count} {stage}" for stage, count in counts.items()) + f", {tally.sessions} of {total} done"


def earned(tally: Tally) -> str:
    mean = tally.mean_reward
    words = [] if mean is None else [f"mean reward {mean:.3g}", f"{tally.solved} of {tally.rewarded} solved"]
    return ", ".join([*words, *([f"without a reward: {listed(tally.reasons)}"] if tally.reasons else [])])


def engine(load: Load, speed: float) -> str:
    words = [f"{speed:,.0f} tokens/s", f"{count(load.calls, 'call')} at the engine"]
    if load.held:
        words.append(f"{load.held} held")
    if load.paused:
        words.append("paused")
    return ", ".join(words)


def in_words(finished: Finished) -> str:
    """A session that has ended, in a line."""
    verdict = finished.verdict
    if verdict.reward is not None:
        said = why(verdict)
        earned = f"reward {verdict.reward:g}" + (f" ({said})" if said else "")
    elif verdict.reason is not None:
        earned = f"no reward ({verdict.reason})"
    else:
        earned = "not evaluated"
    if is_suspicious(verdict.evidence):
        earned += ", suspicious"
    words = [earned, count(finished.turns, "turn"), count(finished.tokens, "token")]
    if finished.outcome is not None:
        words.append(f"{finished.outcome.seconds:.1f} s")
        if finished.outcome.ended != "finished":
            words.append(f"ended by {finished.outcome.ended}")
    return f"{finished.task_id} #{finished.sample}: {', '.join(words)}"
