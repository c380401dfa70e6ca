"""`answer`: the agent's final answer, compared with what is expected.

The answer is taken out of the last thing that the agent said, or out of a file of its workspace: what `pattern` finds
last; without a pattern the last `\\boxed{...}`, else the last line "Answer: ...", else all of it. Only the end of a
long text is looked at. An empty answer is never right.

    exact       the same, but for white space around it
    normalized  the same but for case, white space, punctuation around it, and Markdown's emphasis
    contains    the expected words stand somewhere in it, normalized (an agent that names every choice is right, too)
    regex       the expected pattern is found in it
    number      its last number is the expected one, give or take `tolerance`
"""

import asyncio
import json
import math
import re
import sys
import unicodedata
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from polar.evaluators.base import GradingContext, UngradableWorkError, parse_config
from polar.evaluators.transfer import workspace
from polar.evaluators.transfer.workspace import RuntimePath
from polar.records.session import Verdict
from polar.records.task import RequestModel

_MAX_TEXT_CHARS = 100_000  # characters of the text, from its end
_MAX_FILE_BYTES = 16 << 20  # bytes of the file
_MAX_SHOWN_CHARS = 500

_EMPHASIS_PATTERN = re.compile(r"(?<![\w*`~])[*_`~]{1,3}(?=\S)|(?<=\S)[*_`~]{1,3}(?![\w*`~])")
_SURROUNDING_CHARS = " \t\n\"'“”‘’()[]{}<>$,;:"
_TRAILING_CHARS = ".!?"
_NUMBER_PATTERN = re.compile(
    r"(?:(?<![\w.)])[-+])?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?(?:\s*/\s*[0-9]+)?"
)
_ANSWER_LINE_PATTERN = re.compile(
    r"[\s#>*_]*(?:the )?(?:final )?answer\s*[*_]*(?::| is\b:?)[*_]*\s*(.*)", re.IGNORECASE
)
_SEARCH_TIMEOUT_SECONDS = 10.0
_SEARCH_SCRIPT = """
import json, re, sys
pattern, text = json.load(sys.stdin)
found = None
for found in re.finditer(pattern, text):
    pass
json.dump(None if found is None else found[1 if found.re.groups else 0] or "", sys.stdout)
"""


class AnswerConfig(RequestModel):
    expected: list[str] = Field(min_length=1, description="one, or a list of those that are accepted")
    match: Literal["exact", "normalized", "contains", "regex", "number"] = "normalized"
    tolerance: float = Field(0, ge=0, allow_inf_nan=False, description="of `number`, absolute")
    pattern: str | None = Field(None, description="a regular expression; its last match's first group is the answer")
    file: RuntimePath | None = Field(None, description="holds the answer, in the agent's workspace")

    @field_validator("expected", mode="before")
    @classmethod
    def _to_list(cls, expected: Any) -> Any:
        several = expected if isinstance(expected, list) else [expected]
        return [str(one) if isinstance(one, int | float) and not isinstance(one, bool) else one for one in several]

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        return None if pattern is None else _check_regex(pattern)

    @model_validator(mode="after")
    def _check_expected(self) -> "AnswerConfig":
        for expected in self.expected:
            if self.match == "regex":
                _check_regex(expected)
            elif self.match == "number" and extract_last_number(expected) is None:
                raise ValueError(f"expected: {expected!r} is no number")
            elif not (expected.strip() if self.match == "exact" else normalize(expected)):
                raise ValueError(f"expected: nothing is left of {expected!r} to be compared")
        return self


def _check_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


class Answer:
    needs_fresh_runtime: ClassVar[bool] = False

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = parse_config(AnswerConfig, config)

    async def evaluate(self, work: GradingContext) -> Verdict:
        try:
            answer = await self._extract_answer((await self._read_text(work))[-_MAX_TEXT_CHARS:])
            matches = answer is not None and answer.strip() != "" and await self._matches(answer)
        except UngradableWorkError as error:
            return Verdict(0.0, detail={"why": str(error)})
        except SearchTimeoutError as error:
            return Verdict(0.0, detail={"why": f"The agent's text can't be searched: {error}."})
        return Verdict(float(matches), detail={"answer": None if answer is None else answer[:_MAX_SHOWN_CHARS]})

    async def _read_text(self, work: GradingContext) -> str:
        if self._config.file is None:
            return work.answer
        here = work.scratch / "answer"
        await workspace.get(
            work.agent_runtime,
            workspace.to_absolute(work.agent_runtime, self._config.file),
            here,
            _MAX_FILE_BYTES,
        )
        if here.is_dir():
            raise UngradableWorkError(f"{self._config.file} is a folder.")
        return here.read_text(errors="replace")

    async def _extract_answer(self, text: str) -> str | None:
        if self._config.pattern is not None:
            return await find_last_match(self._config.pattern, text)
        return extract_answer(text)

    async def _matches(self, answer: str) -> bool:
        config = self._config
        if config.match == "exact":
            return answer.strip() in {expected.strip() for expected in config.expected}
        if config.match == "regex":
            return any([await find_last_match(one, answer) is not None for one in config.expected])
        if config.match == "number":
            found = extract_last_number(answer)
            return found is not None and any(self._is_near(found, expected) for expected in config.expected)
        normalized_answer, accepted = normalize(answer), {normalize(expected) for expected in config.expected}
        if config.match == "contains":
            return any(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", normalized_answer) for one in accepted)
        return normalized_answer in accepted

    def _is_near(self, found: float, expected: str) -> bool:
        wanted = extract_last_number(expected)
        return wanted is not None and math.isclose(found, wanted, rel_tol=1e-9, abs_tol=self._config.tolerance)


def extract_answer(text: str) -> str:
    """The answer, where a text says which part of it that is; else the text."""
    if (boxed := _extract_boxed(text)) is not None:
        return boxed
    for line in reversed(text.splitlines()):
        if (found := _ANSWER_LINE_PATTERN.match(line)) and found[1].strip():
            return found[1]
    return text


def _extract_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}`, with the braces that are in it."""
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for end, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if mark and depth == 0:
            return rest[:end]
    return None


def normalize(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).casefold()
    return (
        " ".join(_EMPHASIS_PATTERN.sub("", text).split())
        .strip(_SURROUNDING_CHARS)
        .rstrip(_TRAILING_CHARS + _SURROUNDING_CHARS)
    )


def extract_last_number(text: str) -> float | None:
    found = _NUMBER_PATTERN.findall(unicodedata.normalize("NFKC", text).replace("−", "-"))
    if not found:
        return None
    above, _, below = found[-1].replace(",", "").partition("/")
    try:
        value = float(above) / float(below or 1)
    except ZeroDivisionError:
        return None
    return value if math.isfinite(value) else None


# A pattern of the task's over an agent's text, which can make an innocent one search for years. Python can't break a
# search off: it is done by a process of its own, which has a time limit.


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
