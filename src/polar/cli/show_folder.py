"""What a node kept beside the store of a session that it ran (node.folder)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from polar.cli.show_tokens import escape_controls
from polar.node.finished_session import SessionFolder

_DOCUMENTS = ("verdict", "timing")
_LIMIT_NAMES = {"length": "limit of turns or tokens, or the model's context"}


def read_documents(data: Path, session_id: str) -> dict[str, Any]:
    """The verdict and the timing, where they are there."""
    folder = SessionFolder(data, session_id).path
    found = {}
    for name in _DOCUMENTS:
        path = folder / f"{name}.json"
        if path.exists():
            found[name] = msgspec.json.decode(path.read_bytes())
    return found


def describe_folder(data: Path, session_id: str) -> Iterator[str]:
    found = read_documents(data, session_id)
    if "verdict" in found:
        yield from _describe_verdict(found["verdict"])
    if stages := found.get("timing", {}).get("seconds"):
        yield f"seconds: {', '.join(f'{stage} {seconds:.2f}' for stage, seconds in stages.items())}"
    folder = SessionFolder(data, session_id).path
    if folder.is_dir():
        kept = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
        yield f"in {folder}: {', '.join(kept)}"


def _describe_verdict(verdict: dict[str, Any]) -> Iterator[str]:
    reward, reason, detail = verdict["reward"], verdict["reason"], verdict["detail"]
    earned = "not evaluated" if reason is None else f"no reward: {reason}"
    if reward is not None:
        earned = f"reward {reward:g}"
    yield f"task {verdict['task_id']}, sample {verdict['sample']}: {earned}"
    if verdict["error"]:
        yield f"  {escape_controls(verdict['error'])}"
    if detail:
        yield f"  {_format_fields(detail)}"
    if (outcome := verdict["outcome"]) is not None:
        code = "was killed" if outcome["exit_code"] is None else f"ended with {outcome['exit_code']}"
        limit = (
            "" if outcome["ended"] == "finished" else f", by its {_LIMIT_NAMES.get(outcome['ended'], outcome['ended'])}"
        )
        memory = ", out of memory" if outcome["out_of_memory"] else ""
        yield f"  the harness {code} after {outcome['seconds']:.2f} s{limit}{memory}"


def _format_fields(detail: dict[str, Any]) -> str:
    return ", ".join(f"{escape_controls(name)}: {_format_value(name, value)}" for name, value in detail.items())


def _format_value(name: str, value: Any) -> str:
    """For people; verdict.json has it to the last digit."""
    match value:
        case None:
            return "killed" if name == "exit_code" else "none"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.2f} s" if name == "seconds" else f"{value:.4g}"
        case dict():
            return f"({_format_fields(value)})" if value else "none"
        case list():
            return f"[{', '.join(_format_value('', one) for one in value)}]" if value else "none"
    return escape_controls(str(value))
