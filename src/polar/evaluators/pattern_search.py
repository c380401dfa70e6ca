"""A task's regular expressions over an agent's text. Such a text can make an innocent pattern search for years, and
Python can't break a search off: it is done by a process of its own, which has a time limit."""

import asyncio
import json
import sys

_SEARCH_TIMEOUT_SECONDS = 10.0
_SEARCH_SCRIPT = """
import json, re, sys
pattern, text = json.load(sys.stdin)
found = None
for found in re.finditer(pattern, text):
    pass
json.dump(None if found is None else found[1 if found.re.groups else 0] or "", sys.stdout)
"""


class SearchTimeoutError(Exception):
    """The text keeps the pattern busy."""


async def find_last_match(pattern: str, text: str) -> str | None:
    """The first group of the last match, or all of it where there is no group; None where nothing matches."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", _SEARCH_SCRIPT, stdin=pipe, stdout=pipe
    )
    try:
        async with asyncio.timeout(_SEARCH_TIMEOUT_SECONDS):
            said, _ = await process.communicate(json.dumps([pattern, text]).encode())
    except TimeoutError as error:
        raise SearchTimeoutError(f"the pattern was not done after {_SEARCH_TIMEOUT_SECONDS:g} seconds") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"The search for {pattern!r} ended with {process.returncode}.")
    found: str | None = json.loads(said)
    return found
