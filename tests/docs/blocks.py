"""The code blocks of README.md and docs/, fenced and indented, and what a comment in front of each says of it.

    <!-- run: KIND -->          a test runs it, or has Polar read it; the kinds are in `runner.py`
    <!-- not run: REASON -->    no test runs it, and why; its syntax, and the names in it, are checked all the same

A fence whose info string names a file of the repository (```python examples/x.py) is an excerpt of that file.
"""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

_MARKER = re.compile(r"^<!-- (run|not run): (.+) -->$")
_FENCE = re.compile(r"^( *)(`{3,})(\w*) *(\S*)")
_LIST_ITEM = re.compile(r"^ *([-*]|\d+\.) ")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    text: str
    language: str = ""
    excerpt_of: str = ""
    kind: str = ""
    argument: str = field(default="")
    reason: str = ""

    @property
    def accounted(self) -> str:
        """How: run, excerpt, marked, or not at all."""
        if self.kind:
            return "run"
        if self.excerpt_of:
            return "excerpt"
        return "marked" if self.reason else "neither"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def list_pages() -> list[str]:
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


@cache
def read_blocks(page: str) -> tuple[Block, ...]:
    return tuple(parse_blocks(page, (ROOT / page).read_text(encoding="utf-8")))


def parse_blocks(page: str, text: str) -> list[Block]:
    lines = text.splitlines()
    blocks, marker, in_list, number = [], ("", ""), False, 0
    while number < len(lines):
        line = lines[number]
        if fence := _FENCE.match(line):
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == fence[2])
            blocks.append(_make_block(page, number + 1, lines[number + 1 : end], marker, fence[3], fence[4]))
            number, marker = end, ("", "")
        elif found := _MARKER.match(line):
            marker = (found[1], found[2])
        elif line.startswith("    ") and not in_list:
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            blocks.append(_make_block(page, number + 1, lines[number:end], marker))
            number, marker = end - 1, ("", "")
        elif line.strip():
            in_list = bool(_LIST_ITEM.match(line)) or (in_list and line.startswith("  "))
            marker = ("", "")
        number += 1
    return blocks


def _make_block(
    page: str, line: int, lines: list[str], marker: tuple[str, str], language: str = "", excerpt_of: str = ""
) -> Block:
    indent = min((len(text) - len(text.lstrip()) for text in lines if text.strip()), default=0)
    text = "\n".join(text[indent:] for text in lines).strip("\n") + "\n"
    kind, argument = marker[1].partition(" ")[::2] if marker[0] == "run" else ("", "")
    reason = marker[1] if marker[0] == "not run" else ""
    return Block(page, line, text, language, excerpt_of, kind, argument, reason)
