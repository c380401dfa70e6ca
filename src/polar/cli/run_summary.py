"""What came of a run, when it is over."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar.cli.run_tally import STAGES, Tally, count, listed
from polar.cli.show_tokens import visible
from polar.config import EngineSettings

_SHOWN = 50  # tasks
_WHYS = 3  # that are shown of rewards of 0
_WIDTH = 120  # where there is no terminal

_ADVICE = {
    "prepare_failed": "a step of runtime.prepare failed: run it by hand in the same runtime",
    "harness_failed": "the harness ended before its first model call: see agent.log",
    "engine_failed": "see whether the engine is up: polar doctor",
    "grader_failed": "the task's own grader can't do its work: see logs/ and verdict.json",
    "sandbox_failed": "see what works on this machine: polar doctor",
    "store_failed": "see whether the data folder can be written and its disk has room",
    "node_failed": "an error of Polar's own: please report it, with verdict.json",
    "cancelled": "it was cancelled: run it again",
}


def show(console: Console, tasks: dict[str, Tally], total: Tally, seconds: float) -> None:
    console.print(_table(tasks))
    if (more := len(tasks) - _SHOWN) > 0:
        console.print(f"and {more} more tasks")
    speed = f"{total.tokens / seconds:,.0f} a second"
    console.print(
        f"{count(total.sessions, 'session')} in {seconds:.1f} s: {_earned(total)}; "
        f"{count(total.turns, 'turn')}, {total.tokens:,} tokens sampled ({speed}).",
        highlight=False,
        soft_wrap=True,
    )
    for line in (*_zeros(total), *_describe_tampering(total)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def complaint(total: Tally, data: Path, engine: EngineSettings) -> str:
    """Why there are sessions without a reward, and what to do; empty where there are none."""
    failures = total.failures
    if not failures:
        return ""
    lines = [
        f"{failures.total()} of {count(total.sessions, 'session')} ended without a reward, through no fault of the "
        f"agent's: {listed(failures)}."
    ]
    for reason, _ in failures.most_common():
        first = total.first[reason]
        advice = _ADVICE.get(reason, "see verdict.json")
        if reason == "engine_failed":
            advice += _of(engine)
        lines.append(f"  {reason}: {advice} (in {data / 'sessions' / first.session_id})")
        if first.error:
            lines += [f"    {visible(line)}" for line in first.error.splitlines()]
    return "\n".join(lines)


def console_of_width(console: Console) -> Console:
    """Tables in files are as wide as they need to be."""
    return console if console.is_terminal else Console(file=console.file, width=_WIDTH)


def _table(tasks: dict[str, Tally]) -> Table:
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
    for task_id, tally in list(tasks.items())[:_SHOWN]:
        mean = tally.mean_reward
        table.add_row(
            Text(task_id),
            str(tally.sessions),
            "" if mean is None else f"{mean:.3g}",
            f"{tally.solved}/{tally.rewarded}" if tally.rewarded else "",
            *([listed(tally.reasons)] if reasons else []),
            *([str(tally.suspicious)] if suspicious else []),
            _mean(tally.turns, tally),
            _mean(tally.tokens, tally),
            *(_mean(tally.seconds[stage], tally, 2) for stage in STAGES),
        )
    return table


def _mean(value: float, tally: Tally, digits: int = 1) -> str:
    return f"{value / tally.sessions:.{digits}f}" if tally.sessions else ""


def _of(engine: EngineSettings) -> str:
    """What `polar doctor` is to be told of the engine."""
    if not engine.urls:
        return ""
    return f" {engine.urls[0]}" + ("" if engine.kind == "vllm" else f" --kind {engine.kind}")


def _zeros(total: Tally) -> Iterator[str]:
    if not total.zeros:
        return
    yield "Why rewards are 0:"
    for said, number in total.zeros.most_common(_WHYS):
        yield f"  {count(number, 'session')}: {said}"
    if rest := total.zeros.total() - sum(number for _, number in total.zeros.most_common(_WHYS)):
        yield f"  {count(rest, 'session')} for other reasons"


def _describe_tampering(total: Tally) -> Iterator[str]:
    if total.suspicious:
        yield f"Proven tampering with the grading: {count(total.suspicious, 'session')} ({listed(total.evidence)})."
    if total.suspected:
        yield f"Unproven signs of tampering, which change no reward: {count(total.suspected, 'session')}."


def _earned(total: Tally) -> str:
    if not total.rewarded:
        return "no rewards"
    return f"mean reward {total.mean_reward:.3g}, {total.solved} of {total.rewarded} solved"
