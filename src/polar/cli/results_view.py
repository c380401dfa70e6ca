"""Results as people read them: a line, a table, or what is wrong with them."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct, field
from rich.table import Table
from rich.text import Text

from polar.cli.run_tally import format_count, format_counts
from polar.cli.show_tokens import escape_controls
from polar.records.result import SessionResult
from polar.records.task import MASKED_REASONS

_INTENDED_REASONS = MASKED_REASONS | {"early_stop", "stale"}
"""Reasons that a session has no reward because its task says so."""
_MAX_NAMED_FAILURES = 5


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


class EndedSession(Struct):
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
    def tampering_kinds(self) -> str:
        """Kinds of proven evidence."""
        return ", ".join(dict.fromkeys(escape_controls(evidence.kind) for evidence in self.evidence if evidence.proven))

    @property
    def reward_text(self) -> str:
        if self.reward is not None:
            return f"{self.reward:g}"
        return "none" if self.reason is None else escape_controls(self.reason)


class EndedGroup(Struct):
    """All sessions of a task, likewise."""

    task_id: str
    status: str
    cursor: int
    asked: int
    usable: int
    cancelled: int
    results: list[EndedSession]


decode_session = msgspec.json.Decoder(EndedSession).decode
decode_group = msgspec.json.Decoder(EndedGroup).decode


def convert_result(result: SessionResult) -> EndedSession:
    return msgspec.convert(result.model_dump(exclude={"trajectory"}), EndedSession)


def describe_result(result: EndedSession | EndedGroup) -> str:
    """In a line."""
    if isinstance(result, EndedGroup):
        usable = f"{result.usable} of {result.asked} usable"
        suspicious = _count_suspicious(result.results)
        words = [
            result.status,
            usable,
            describe_mean_reward(result.results),
            *([f"{suspicious} suspicious"] if suspicious else []),
        ]
        return f"{result.cursor}  {escape_controls(result.task_id)}: {', '.join(words)}"
    number = "" if result.sample is None else f" #{result.sample}"
    words = [f"reward {result.reward_text}" if result.reward is not None else f"no reward ({result.reward_text})"]
    words += [format_count(result.metadata.turns, "turn"), format_count(result.metadata.sampled_tokens, "token")]
    words += [f"suspicious: {result.tampering_kinds}"] if result.metadata.suspicious else []
    return f"{result.cursor}  {escape_controls(result.task_id)}{number}: {', '.join(words)} ({result.session_id})"


def make_session_table(results: Iterable[EndedSession]) -> Table:
    results = list(results)
    suspicious = ["suspicious"] * any(result.metadata.suspicious for result in results)
    table = _make_table("cursor", "task", "sample", "session", "reward", *suspicious, "turns", "tokens", "seconds")
    for result in results:
        seconds = result.metadata.timing.seconds
        table.add_row(
            _format_cell(result.cursor),
            Text(escape_controls(result.task_id)),
            _format_cell(result.sample),
            Text(result.session_id),
            Text(result.reward_text),
            *(Text(result.tampering_kinds) for _ in suspicious),
            f"{result.metadata.turns:,}",
            f"{result.metadata.sampled_tokens:,}",
            "" if seconds is None else f"{seconds:.1f}",
        )
    return table


def make_group_table(results: Iterable[EndedGroup]) -> Table:
    results = list(results)
    suspicious = ["suspicious"] * any(_count_suspicious(result.results) for result in results)
    table = _make_table("cursor", "task", "status", "asked", "usable", "cancelled", *suspicious, "reward")
    for result in results:
        counts = (
            result.asked,
            result.usable,
            result.cancelled,
            *(_count_suspicious(result.results) for _ in suspicious),
        )
        table.add_row(
            str(result.cursor),
            Text(escape_controls(result.task_id)),
            result.status,
            *(f"{n:,}" for n in counts),
            describe_mean_reward(result.results),
        )
    return table


def _count_suspicious(results: Iterable[EndedSession]) -> int:
    return sum(result.metadata.suspicious for result in results)


def describe_mean_reward(results: Iterable[EndedSession]) -> str:
    rewards = [result.reward for result in results if result.reward is not None]
    return f"mean reward {sum(rewards) / len(rewards):.3g}" if rewards else "no rewards"


def describe_failures(results: list[EndedSession]) -> str:
    """Which sessions have no reward that should have one; empty where there are none."""
    failed = [one for one in results if one.reason is not None and one.reason not in _INTENDED_REASONS]
    if not failed:
        return ""
    reasons = Counter(escape_controls(one.reason or "") for one in failed)
    lines = [
        f"{len(failed)} of {format_count(len(results), 'session')} ended without a reward: {format_counts(reasons)}."
    ]
    lines += [
        f"  {escape_controls(one.task_id)} ({one.session_id}): {escape_controls(one.error or '')}"
        for one in failed[:_MAX_NAMED_FAILURES]
    ]
    return "\n".join(lines)


def _make_table(*names: str) -> Table:
    table = Table()
    for name in names:
        words = name in ("task", "session", "status", "reward")
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=name == "session")
    return table


def _format_cell(value: Any) -> str:
    return "" if value is None else str(value)
