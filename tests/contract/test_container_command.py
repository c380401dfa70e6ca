"""What the shell in a container is told, told to a shell of this machine."""

import os
import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st

from polar.runtimes.containers.runtime import WAIT_SCRIPT, build_script

MARK = "0123456789abcdef"
SHOW = r"""printf '%s\0' "$PWD" "$VALUE" "$@"; cat; echo error >&2; exit 7"""
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["", "'", "\n", "a\n", "$(id)", "`id`", "\\", '"', "*", "-n", MARK, f"\n{MARK}", "--", "~"]
)


@settings(max_examples=40, deadline=None)
@given(arguments=st.lists(TEXT, max_size=4), value=TEXT, stdin=st.binary(max_size=50))
def test_arguments_environment_and_input_come_through_as_they_are(
    arguments: list[str], value: str, stdin: bytes
) -> None:
    told = build_script(["sh", "-c", SHOW, "sh", *arguments], {"VALUE": value, "a.b": "c"}, "/usr", MARK + "x")
    ran = subprocess.run(
        ["/bin/sh", "-c", WAIT_SCRIPT, MARK + "x"], input=told + stdin, capture_output=True, check=False
    )
    shown = b"".join(os.fsencode(text) + b"\0" for text in ("/usr", value, *arguments))
    assert ran.stdout == shown + stdin + b"error\n"
    assert ran.returncode == 7
    assert ran.stderr.split()[0] == f"{MARK}x".encode()


def test_what_ends_before_the_mark_is_not_run() -> None:
    told = build_script(["echo", "ran"], {}, "/", MARK)
    cut = told[: told.index(MARK.encode())]
    ran = subprocess.run(["/bin/sh", "-c", WAIT_SCRIPT, MARK], input=cut, capture_output=True, check=False)
    assert (ran.stdout, ran.returncode) == (b"", 1)
