"""Which files a patch in git's format is about."""

import re

_HEADER = re.compile(r"^(?:---|\+\+\+|rename from|rename to|copy from|copy to) (.*?)(?:\t.*)?$")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_ESCAPED_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


def list_paths(text: str, *, existing_only: bool = False) -> list[str]:
    """Every path that it names, in its order; with `left`, those that are there when it is applied."""
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
