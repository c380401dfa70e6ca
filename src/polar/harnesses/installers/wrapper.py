"""The program that starts an installed harness: a few lines of sh.

It finds what it starts by its own path, changes no variable of the environment, and is gone once the harness runs.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

_SH = """\
#!/bin/sh
[ -L "$0" ] && exec "$(readlink -f "$0")" "$@"
exec {words} "$@"
"""


def write_wrapper(
    folder: Path, name: str, program: str, options: Sequence[str] = (), script: str | None = None
) -> None:
    """`folder`/bin/`name`. `program` and `script` are paths below the folder."""
    words = [_quote_relative_path(program), *map(shlex.quote, options)]
    if script is not None:
        words.append(_quote_relative_path(script))
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(_SH.format(words=" ".join(words)))
    file.chmod(0o755)


def _quote_relative_path(path: str) -> str:
    return '"${0%/*}"/../' + shlex.quote(path)
