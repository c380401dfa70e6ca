"""Patches in git's format: made of changes so that `git apply` takes them, and the paths that one names.

The content comes from an agent: what it costs to compare is bounded, however it is made. Text is compared line by line
as long as that is cheap, and otherwise what differs is one block; binary files come whole; what is too large is only
named, in lines at the top that git skips.
"""

import base64
import hashlib
import re
import zlib
from pathlib import Path

from msgspec import Struct

from polar.evaluators.changes import FileChange, FolderEntry, read_content

MAX_FILE_BYTES = 1 << 20
MAX_PATCH_BYTES = 32 << 20

_CONTEXT_LINES = 3  # lines around a difference
_BINARY_PROBE_BYTES = 8000  # bytes: where git looks for a zero byte to tell binary files
_MAX_COMPARISONS = 8_000_000  # comparisons of lines in one patch
_MAX_FILE_COMPARISONS = 1_000_000
_MAX_FILE_EDITS = 1000  # in one file, found line by line
_NO_OBJECT = "0" * 40
_HEADER = re.compile(r"^(?:---|\+\+\+|rename from|rename to|copy from|copy to) (.*?)(?:\t.*)?$")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_ESCAPED_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


class Patch(Struct, frozen=True):
    text: bytes
    left_out: list[str]  # paths whose change is not in it


def make_patch(
    before: Path,
    after: Path,
    changed: list[FileChange],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    max_bytes: int = MAX_PATCH_BYTES,
) -> Patch:
    """`changed` is what `changes.find_changes` found between the two, or a part of it."""
    parts: list[bytes] = []
    left_out: list[FileChange] = []
    size, steps = 0, _ComparisonBudget(_MAX_COMPARISONS)
    for change in changed:
        sides = [entry.size for entry in (change.before, change.after) if entry is not None]
        part = None if max(sides) > max_file_bytes else _make_file_patch(before, after, change, steps)
        if part is None or size + len(part) > max_bytes:
            left_out.append(change)
        else:
            parts.append(part)
            size += len(part)
    named = [
        f"# left out, too large: {change.kind} ".encode() + _quote_path(change.path) + b"\n" for change in left_out
    ]
    return Patch(b"".join(named + parts), [change.path for change in left_out])


class _ComparisonBudget:
    """What comparing may still cost."""

    def __init__(self, left: int) -> None:
        self.left = left


def _make_file_patch(before: Path, after: Path, change: FileChange, steps: _ComparisonBudget) -> bytes:
    old = _read_side(before, change.path, change.before)
    new = _read_side(after, change.path, change.after)
    ours, theirs = _quote_path("a/" + change.path), _quote_path("b/" + change.path)
    head = [b"diff --git " + ours + b" " + theirs, *_format_mode_lines(change)]
    if old == new:  # a mode, or an empty file
        return b"\n".join(head) + b"\n"
    if b"\0" in old[:_BINARY_PROBE_BYTES] or b"\0" in new[:_BINARY_PROBE_BYTES]:
        head.append(f"index {_compute_blob_id(change.before, old)}..{_compute_blob_id(change.after, new)}".encode())
        return b"\n".join([*head, b"GIT binary patch", *_encode_literal(new), b"", *_encode_literal(old), b"", b""])
    ours = b"/dev/null" if change.before is None else _terminate_name(ours)
    theirs = b"/dev/null" if change.after is None else _terminate_name(theirs)
    lines = [*head, b"--- " + ours, b"+++ " + theirs]
    return b"\n".join(lines) + b"\n" + b"".join(_make_hunks(_split_lines(old), _split_lines(new), steps))


def _read_side(top: Path, path: str, entry: FolderEntry | None) -> bytes:
    return b"" if entry is None else read_content(top / path, entry.mode)


def _format_mode_lines(change: FileChange) -> list[bytes]:
    if change.before is None:
        assert change.after is not None
        return [f"new file mode {change.after.mode}".encode()]
    if change.after is None:
        return [f"deleted file mode {change.before.mode}".encode()]
    if change.before.mode != change.after.mode:
        return [f"old mode {change.before.mode}".encode(), f"new mode {change.after.mode}".encode()]
    return []


def _quote_path(path: str) -> bytes:
    """As git quotes names that would break a line; others stand as they are."""
    name = path.encode(errors="surrogateescape")
    letters = {ord('"'): b'\\"', ord("\\"): b"\\\\", 9: b"\\t", 10: b"\\n", 13: b"\\r"}
    try:
        name.decode()
        high = False
    except UnicodeDecodeError:
        high = True
    quoted = b"".join(
        letters.get(byte) or (b"\\%03o" % byte if byte < 32 or byte == 127 or (high and byte > 127) else bytes([byte]))
        for byte in name
    )
    return quoted if quoted == name else b'"' + quoted + b'"'


def _terminate_name(name: bytes) -> bytes:
    """After a name with blanks in it, a tab says where it ends."""
    return name + b"\t" if b" " in name else name


def _compute_blob_id(entry: FolderEntry | None, data: bytes) -> str:
    """The name under which git holds a content."""
    if entry is None:
        return _NO_OBJECT
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _encode_literal(data: bytes) -> list[bytes]:
    packed = zlib.compress(data)
    lines = [b"literal %d" % len(data)]
    for start in range(0, len(packed), 52):
        piece = packed[start : start + 52]
        count = len(piece) + (64 if len(piece) <= 26 else 70)  # A to Z, then a to z
        lines.append(bytes([count]) + base64.b85encode(piece, pad=True))
    return lines


def _split_lines(data: bytes) -> list[bytes]:
    """Only a line feed ends one: a return, or a form feed, is a letter like others."""
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


class _Block(Struct, frozen=True):
    """Lines [start, stop) of the old become lines [new_start, new_stop) of the new."""

    start: int
    stop: int
    new_start: int
    new_stop: int


def _make_hunks(old: list[bytes], new: list[bytes], steps: _ComparisonBudget) -> list[bytes]:
    hunks: list[bytes] = []
    group: list[_Block] = []
    for block in _find_blocks(old, new, steps):
        if group and block.start - group[-1].stop > 2 * _CONTEXT_LINES:
            hunks.append(_make_hunk(old, new, group))
            group = []
        group.append(block)
    return [*hunks, _make_hunk(old, new, group)]


def _make_hunk(old: list[bytes], new: list[bytes], blocks: list[_Block]) -> bytes:
    start, stop = max(0, blocks[0].start - _CONTEXT_LINES), min(len(old), blocks[-1].stop + _CONTEXT_LINES)
    new_start = blocks[0].new_start - (blocks[0].start - start)
    new_stop = blocks[-1].new_stop + (stop - blocks[-1].stop)
    text = [f"@@ -{_format_range(start, stop)} +{_format_range(new_start, new_stop)} @@\n".encode()]
    at = start
    for block in blocks:
        text += [_prefix_line(b" ", line) for line in old[at : block.start]]
        text += [_prefix_line(b"-", line) for line in old[block.start : block.stop]]
        text += [_prefix_line(b"+", line) for line in new[block.new_start : block.new_stop]]
        at = block.stop
    return b"".join(text + [_prefix_line(b" ", line) for line in old[at:stop]])


def _format_range(start: int, stop: int) -> str:
    count = stop - start
    if count == 1:
        return str(start + 1)
    return f"{start + 1 if count else start},{count}"


def _prefix_line(mark: bytes, line: bytes) -> bytes:
    return mark + line if line.endswith(b"\n") else mark + line + b"\n\\ No newline at end of file\n"


def _find_blocks(old: list[bytes], new: list[bytes], steps: _ComparisonBudget) -> list[_Block]:
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    numbers: dict[bytes, int] = {}
    ours = [numbers.setdefault(line, len(numbers)) for line in old[head : len(old) - tail]]
    theirs = [numbers.setdefault(line, len(numbers)) for line in new[head : len(new) - tail]]
    kept = _match_lines(ours, theirs, steps)
    if kept is None:
        return [_Block(head, head + len(ours), head, head + len(theirs))]
    blocks = []
    start = new_start = 0
    for one, other in [*kept, (len(ours), len(theirs))]:
        if one > start or other > new_start:
            blocks.append(_Block(head + start, head + one, head + new_start, head + other))
        start, new_start = one + 1, other + 1
    return blocks


def _match_lines(old: list[int], new: list[int], steps: _ComparisonBudget) -> list[tuple[int, int]] | None:
    """The lines that stay, as pairs of positions, by Myers' greedy search for the fewest edits; None where that would
    take too many. Row `e` holds how far in `old` one gets with e edits, for the diagonals (position in old less that
    in new) -e, -e + 2, ... e."""
    if not old or not new:
        return []
    left = min(steps.left, _MAX_FILE_COMPARISONS)
    rows: list[list[int]] = []
    for edits in range(min(len(old) + len(new), _MAX_FILE_EDITS) + 1):
        row: list[int] = []
        for index in range(edits + 1):
            diagonal = 2 * index - edits
            start = at = _find_row_start(rows, index)
            while at < len(old) and at - diagonal < len(new) and old[at] == new[at - diagonal]:
                at += 1
            left -= 1 + at - start
            steps.left -= 1 + at - start
            row.append(at)
            if at >= len(old) and at - diagonal >= len(new):
                return _trace_back([*rows, row], index)
        if left < 0:
            return None
        rows.append(row)
    return None


def _find_row_start(rows: list[list[int]], index: int) -> int:
    """Where the next row gets on a diagonal by its edit: a line less of the old, or one more of the new."""
    if not rows:
        return 0
    return rows[-1][index] if _is_insertion(rows[-1], index) else rows[-1][index - 1] + 1


def _is_insertion(last: list[int], index: int) -> bool:
    return index == 0 or (index < len(last) and last[index - 1] < last[index])


def _trace_back(rows: list[list[int]], index: int) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    while rows:
        at = rows.pop()[index]
        diagonal = 2 * index - len(rows)
        start = _find_row_start(rows, index)
        kept += [(position, position - diagonal) for position in range(at - 1, start - 1, -1)]
        if rows and not _is_insertion(rows[-1], index):
            index -= 1
    return kept[::-1]


# Which files a patch is about.


def list_patch_paths(text: str, *, existing_only: bool = False) -> list[str]:
    """Every path that a patch in git's format names, in its order; with `existing_only`, those that are there
    once it is applied."""
    found: dict[str, bool] = {}
    last = ""
    old, new = 0, 0  # lines of a hunk still to come: they may well look like headers
    for line in text.split("\n"):
        if old > 0 or new > 0:
            old -= line[:1] in (" ", "-", "")
            new -= line[:1] in (" ", "+", "")
        elif hunk := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            old, new = (1 if count is None else int(count) for count in hunk.groups())
        elif line.startswith("diff --git "):
            for path in _parse_header_names(line.removeprefix("diff --git ")):
                found.setdefault(path, True)
        elif named := _HEADER.match(line):
            word, path = line.split(" ")[0], _unquote(named[1])
            if word == "+++" and path == "/dev/null":
                found[last] = False
            elif path != "/dev/null":
                path = path.partition("/")[2] if word in ("---", "+++") else path
                found[path] = not line.startswith("rename from")
                last = path
    return [path for path, there in found.items() if there or not existing_only]


def _parse_header_names(names: str) -> list[str]:
    """`a/x b/x`: the same name twice but for what is renamed, which is named again in lines of its own."""
    if names.startswith('"'):
        match = re.match(r'"((?:[^"\\]|\\.)*)"', names)
        return [] if match is None else [_unquote(match[0]).partition("/")[2]]
    half = len(names) // 2
    ours, theirs = names[:half], names[half + 1 :]
    return [ours.removeprefix("a/")] if ours[2:] == theirs[2:] else []


def _unquote(name: str) -> str:
    if not (name.startswith('"') and name.endswith('"')):
        return name
    data = _ESCAPE.sub(_unescape, name[1:-1].encode())
    return data.decode(errors="surrogateescape")


def _unescape(match: re.Match[bytes]) -> bytes:
    escaped = match[1]
    return bytes([int(escaped, 8) & 255]) if len(escaped) == 3 else _ESCAPED_LETTERS.get(escaped, escaped)
