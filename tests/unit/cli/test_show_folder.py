"""What polar show tells of a session's verdict and its seconds."""

from pathlib import Path
from typing import Any

from polar.cli.show import describe_folder
from polar.node.finished_session import SessionFolder

VERDICT: dict[str, Any] = {
    "task_id": "t",
    "sample": 0,
    "reward": 0.0,
    "reason": None,
    "error": None,
    "detail": {},
    "outcome": {"ended": "finished", "exit_code": 0, "seconds": 0.0312345, "out_of_memory": False},
}


def said(data: Path, seconds: dict[str, float], **verdict: Any) -> list[str]:
    folder = SessionFolder(data, "s")
    folder.create()
    folder.write_json("verdict.json", VERDICT | verdict)
    folder.write_json("timing.json", {"began_at": 1.0, "seconds": seconds})
    return list(describe_folder(data, "s"))


def test_seconds_are_rounded(tmp_path: Path) -> None:
    detail = {"exit_code": 1, "seconds": 0.0312345, "why": "No."}
    assert said(tmp_path, {"queued": 0.00012, "run": 1.23456}, detail=detail) == [
        "task t, sample 0: reward 0",
        "  exit_code: 1, seconds: 0.03 s, why: No.",
        "  the harness ended with 0 after 0.03 s",
        "seconds: queued 0.00, run 1.23",
        f"in {tmp_path / 'sessions' / 's'}: logs/, timing.json, verdict.json",
    ]


def test_a_detail_is_told_in_words(tmp_path: Path) -> None:
    detail = {
        "tests": {"reward": 1 / 3, "exit_code": None, "live": True, "dropped": []},
        "answer": None,
        "failed": ["a\x1b[2J", "b"],
    }
    assert said(tmp_path, {}, detail=detail)[1] == (
        "  tests: (reward: 0.3333, exit_code: killed, live: yes, dropped: none), answer: none, failed: [a␛[2J, b]"
    )


def test_without_stages_there_are_no_seconds(tmp_path: Path) -> None:
    shown = said(tmp_path, {}, reward=None, reason="cancelled", outcome=None)
    assert shown[0] == "task t, sample 0: no reward: cancelled"
    assert len(shown) == 2
    assert shown[1].startswith("in ")


def test_a_limit_is_told_in_words(tmp_path: Path) -> None:
    outcome = {"ended": "length", "exit_code": None, "seconds": 2.0, "out_of_memory": False}
    assert "  the harness was killed after 2.00 s, by its limit of turns or tokens, or the model's context" in said(
        tmp_path, {}, outcome=outcome
    )
    assert "  the harness was killed after 2.00 s, by its timeout" in said(
        tmp_path, {}, outcome=outcome | {"ended": "timeout"}
    )
