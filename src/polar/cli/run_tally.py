"""Tallies of finished sessions, and the summary of a run."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar.cli.show_tokens import escape_controls
from polar.config import EngineSettings
from polar.node.finished_session import FinishedSession
from polar.records.session import Verdict, is_suspicious
from polar.records.task import MASKED_REASONS

STAGES = ("init", "ready", "run", "postrun")
_MAX_EXPLANATION_CHARS = 120


class Failure(Struct, frozen=True):
    """The first session without a reward for a given reason."""

    session_id: str
    error: str | None


class RunTally(Struct):
    sessions: int = 0
    last_session_id: str = ""  # the session that ended last
    rewarded: int = 0
    reward_sum: float = 0.0
    solved: int = 0  # with a reward of 1 or more
    reasons: Counter[str] = field(default_factory=Counter)
    first_failures: dict[str, Failure] = field(default_factory=dict)  # by reason
    suspicious: int = 0  # with proven evidence of tampering
    evidence_kinds: Counter[str] = field(default_factory=Counter)  # proven, by kind
    suspected: int = 0  # with unproven evidence alone
    zero_reward_reasons: Counter[str] = field(
        default_factory=Counter
    )  # rewards of 0, by why, where the evaluator says so
    exited_cleanly: int = 0  # harnesses that exited by themselves with status 0
    turns: int = 0
    tokens: int = 0
    seconds: Counter[str] = field(default_factory=Counter)  # by stage

    def add(self, finished: FinishedSession) -> None:
        verdict = finished.verdict
        self.sessions += 1
        self.last_session_id = finished.session_id
        self.turns += finished.turns
        self.tokens += finished.tokens
        self.seconds.update(finished.seconds)
        outcome = finished.outcome
        self.exited_cleanly += outcome is not None and outcome.end_reason == "finished" and outcome.exit_code == 0
        self.suspicious += is_suspicious(verdict.evidence)
        self.suspected += bool(verdict.evidence) and not is_suspicious(verdict.evidence)
        self.evidence_kinds.update({evidence.kind for evidence in verdict.evidence if evidence.proven})
        if verdict.reward is not None:
            self.rewarded += 1
            self.reward_sum += verdict.reward
            self.solved += verdict.reward >= 1
            if verdict.reward == 0 and (explanation := explain_reward(verdict)):
                self.zero_reward_reasons[explanation] += 1
        elif verdict.reason is not None:
            self.reasons[verdict.reason] += 1
            self.first_failures.setdefault(verdict.reason, Failure(finished.session_id, finished.error))

    @property
    def mean_reward(self) -> float | None:
        return self.reward_sum / self.rewarded if self.rewarded else None

    @property
    def platform_failures(self) -> Counter[str]:
        """Reasons that are neither the agent's nor the task's."""
        return Counter({reason: count for reason, count in self.reasons.items() if reason not in MASKED_REASONS})


def explain_reward(verdict: Verdict) -> str:
    """The evaluator's explanation of a reward as a short line, which may quote the agent; empty where it has none."""
    explanation = verdict.detail.get("why")
    if not isinstance(explanation, str):
        return ""
    flat = escape_controls(" ".join(explanation.split()))
    return flat if len(flat) <= _MAX_EXPLANATION_CHARS else f"{flat[: _MAX_EXPLANATION_CHARS - 1]}…"


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


# Printed when the run is over

_MAX_TASKS_SHOWN = 50
_MAX_ZERO_REASONS_SHOWN = 3  # of rewards of 0
_FILE_WIDTH_CHARS = 120  # width of tables without a terminal

_ADVICE = {
    "prepare_failed": "a step of runtime.prepare failed: run it by hand in the same runtime",
    "harness_failed": "the harness ended before its first model call: see agent.log",
    "engine_failed": "check whether the engine is up: polar doctor",
    "grader_failed": "the task's grader failed: see logs/ and verdict.json",
    "sandbox_failed": "check what works on this machine: polar doctor",
    "store_failed": "check whether the data folder is writable and its disk has space",
    "node_failed": "an error in Polar: please report it with verdict.json",
    "cancelled": "the session was cancelled: run it again",
}


def print_summary(console: Console, tasks: dict[str, RunTally], total: RunTally, seconds: float) -> None:
    console.print(_make_task_table(tasks))
    if (omitted := len(tasks) - _MAX_TASKS_SHOWN) > 0:
        console.print(f"and {omitted} more tasks")
    speed = f"{total.tokens / seconds:,.0f} a second"
    console.print(
        f"{format_count(total.sessions, 'session')} in {seconds:.1f} s: {_describe_rewards(total)}; "
        f"{format_count(total.turns, 'turn')}, {total.tokens:,} tokens sampled ({speed}).",
        highlight=False,
        soft_wrap=True,
    )
    for line in (*_describe_zero_rewards(total), *_describe_tampering(total)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def describe_failures(total: RunTally, data: Path, engine: EngineSettings) -> str:
    """Which sessions the platform failed, and what to do; empty where there are none."""
    failures = total.platform_failures
    if not failures:
        return ""
    lines = [
        f"{failures.total()} of {format_count(total.sessions, 'session')} ended without a reward because the platform "
        f"failed: {format_counts(failures)}."
    ]
    for reason, _ in failures.most_common():
        first = total.first_failures[reason]
        advice = _ADVICE.get(reason, "see verdict.json")
        if reason == "engine_failed":
            advice += _format_doctor_arguments(engine)
        lines.append(f"  {reason}: {advice} (in {data / 'sessions' / first.session_id})")
        if first.error:
            lines += [f"    {escape_controls(line)}" for line in first.error.splitlines()]
    return "\n".join(lines)


def set_file_width(console: Console) -> Console:
    """Gives a console that writes to a file a fixed width."""
    return console if console.is_terminal else Console(file=console.file, width=_FILE_WIDTH_CHARS)


def _make_task_table(tasks: dict[str, RunTally]) -> Table:
    reasons = any(tally.reasons for tally in tasks.values())
    suspicious = any(tally.suspicious for tally in tasks.values())
    table = Table(title="Means of each task's sessions", title_justify="left")
    table.add_column("task", overflow="fold")
    for name in ("samples", "reward", "solved"):
        table.add_column(name, justify="right")
    if reasons:
        table.add_column("no reward", overflow="fold")
    if suspicious:
        table.add_column("suspicious", justify="right")
    for name in ("turns", "tokens", *(f"{stage} s" for stage in STAGES)):
        table.add_column(name, justify="right")
    for task_id, tally in list(tasks.items())[:_MAX_TASKS_SHOWN]:
        mean = tally.mean_reward
        table.add_row(
            Text(task_id),
            str(tally.sessions),
            "" if mean is None else f"{mean:.3g}",
            f"{tally.solved}/{tally.rewarded}" if tally.rewarded else "",
            *([format_counts(tally.reasons)] if reasons else []),
            *([str(tally.suspicious)] if suspicious else []),
            _format_mean(tally.turns, tally),
            _format_mean(tally.tokens, tally),
            *(_format_mean(tally.seconds[stage], tally, 2) for stage in STAGES),
        )
    return table


def _format_mean(value: float, tally: RunTally, digits: int = 1) -> str:
    return f"{value / tally.sessions:.{digits}f}" if tally.sessions else ""


def _format_doctor_arguments(engine: EngineSettings) -> str:
    """The arguments with which `polar doctor` checks this engine."""
    if not engine.urls:
        return ""
    return f" {engine.urls[0]}" + ("" if engine.kind == "vllm" else f" --kind {engine.kind}")


def _describe_zero_rewards(total: RunTally) -> Iterator[str]:
    if not total.zero_reward_reasons:
        return
    yield "Why rewards are 0:"
    for reason, number in total.zero_reward_reasons.most_common(_MAX_ZERO_REASONS_SHOWN):
        yield f"  {format_count(number, 'session')}: {reason}"
    if others := total.zero_reward_reasons.total() - sum(
        number for _, number in total.zero_reward_reasons.most_common(_MAX_ZERO_REASONS_SHOWN)
    ):
        yield f"  {format_count(others, 'session')} for other reasons"


def _describe_tampering(total: RunTally) -> Iterator[str]:
    if total.suspicious:
        sessions, kinds = format_count(total.suspicious, "session"), format_counts(total.evidence_kinds)
        yield f"Proven tampering with the grading: {sessions} ({kinds})."
    if total.suspected:
        yield f"Unproven signs of tampering, which change no reward: {format_count(total.suspected, 'session')}."


def _describe_rewards(total: RunTally) -> str:
    if not total.rewarded:
        return "no rewards"
    return f"mean reward {total.mean_reward:.3g}, {total.solved} of {total.rewarded} solved"
