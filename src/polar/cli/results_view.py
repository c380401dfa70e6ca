"""Results as people read them: a line, a table, or what is wrong with them."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct, field
from rich.table import Table
from rich.text import Text

from polar.cli.run_tally import count, listed
from polar.cli.show_tokens import visible
from polar.rollout.models import SessionResult
from polar.rollout.semantics import MASKED

_WANTED = MASKED | {"early_stop", "stale"}
"""Reasons that a session has no reward because its task says so."""
_NAMED = 5


class _Timing(Struct):
    seconds: float | None = None


class _Metadata(Struct):
    turns: int = 0
    sampled_tokens: int = 0
    suspicious: bool = False
    timing: _Timing = field(default_factory=_Timing)


class _Evidence(Struct):
    kind: str
    proven: bool = False


class Ended(Struct):
    """A session's result without its trajectory."""

    task_id: str
    session_id: str
    cursor: int | None = None
    sample: int | None = None
    reward: float | None = None
    reason: str | None = None
    error: str | None = None
    metadata: _Metadata = field(default_factory=_Metadata)
    evidence: list[_Evidence] = field(default_factory=list)

    @property
    def tampering(self) -> str:
        """Kinds of proven evidence."""
        return ", ".join(dict.fromkeys(visible(one.kind) for one in self.evidence if one.proven))

    @property
    def earned(self) -> str:
        if self.reward is not None:
            return f"{self.reward:g}"
        return "none" if self.reason is None else visible(self.reason)


class Group(Struct):
    """All sessions of a task, likewise."""

    task_id: str
    status: str
    cursor: int
    asked: int
    usable: int
    cancelled: int
    results: list[Ended]


ended_of = msgspec.json.Decoder(Ended).decode
group_of = msgspec.json.Decoder(Group).decode


def ended_from(result: SessionResult) -> Ended:
    return msgspec.convert(result.model_dump(exclude={"trajectory"}), Ended)


def in_words(one: Ended | Group) -> str:
    """In a line."""
    if isinstance(one, Group):
        usable = f"{one.usable} of {one.asked} usable"
        suspicious = _suspicious(one.results)
        words = [one.status, usable, mean(one.results), *([f"{suspicious} suspicious"] if suspicious else [])]
        return f"{one.cursor}  {visible(one.task_id)}: {', '.join(words)}"
    number = "" if one.sample is None else f" #{one.sample}"
    words = [f"reward {one.earned}" if one.reward is not None else f"no reward ({one.earned})"]
    words += [count(one.metadata.turns, "turn"), count(one.metadata.sampled_tokens, "token")]
    words += [f"suspicious: {one.tampering}"] if one.metadata.suspicious else []
    return f"{one.cursor}  {visible(one.task_id)}{number}: {', '.join(words)} ({one.session_id})"


def sessions(results: Iterable[Ended]) -> Table:
    results = list(results)
    suspicious = ["suspicious"] * any(one.metadata.suspicious for one in results)
    table = _table("cursor", "task", "sample", "session", "reward", *suspicious, "turns", "tokens", "seconds")
    for one in results:
        seconds = one.metadata.timing.seconds
        table.add_row(
            _said(one.cursor),
            Text(visible(one.task_id)),
            _said(one.sample),
            Text(one.session_id),
            Text(one.earned),
            *(Text(one.tampering) for _ in suspicious),
            f"{one.metadata.turns:,}",
            f"{one.metadata.sampled_tokens:,}",
            "" if seconds is None else f"{seconds:.1f}",
        )
    return table


def groups(results: Iterable[Group]) -> Table:
    results = list(results)
    suspicious = ["suspicious"] * any(_suspicious(one.results) for one in results)
    table = _table("cursor", "task", "status", "asked", "usable", "cancelled", *suspicious, "reward")
    for one in results:
        counts = (one.asked, one.usable, one.cancelled, *(_suspicious(one.results) for _ in suspicious))
        table.add_row(
            str(one.cursor), Text(visible(one.task_id)), one.status, *(f"{n:,}" for n in counts), mean(one.results)
        )
    return table


def _suspicious(results: Iterable[Ended]) -> int:
    return sum(one.metadata.suspicious for one in results)


def mean(results: Iterable[Ended]) -> str:
    rewards = [one.reward for one in results if one.reward is not None]
    return f"mean reward {sum(rewards) / len(rewards):.3g}" if rewards else "no rewards"


def complaint(results: list[Ended]) -> str:
    """Which sessions have no reward that should have one; empty where there are none."""
    failed = [one for one in results if one.reason is not None and one.reason not in _WANTED]
    if not failed:
        return ""
    reasons = Counter(visible(one.reason or "") for one in failed)
    lines = [f"{len(failed)} of {count(len(results), 'session')} ended without a reward: {listed(reasons)}."]
    lines += [f"  {visible(one.task_id)} ({one.session_id}): {visible(one.error or '')}" for one in failed[:_NAMED]]
    return "\n".join(lines)


def _table(*names: str) -> Table:
    table = Table()
    for name in names:
        words = name in ("task", "session", "status", "reward")
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=name == "session")
    return table


def _said(value: Any) -> str:
    return "" if value is None else str(value)
