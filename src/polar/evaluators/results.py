"""How each test of a run ended, and what that says of the tests that a task names.

A test has several names: datasets and tools write them differently. One that is named counts as passed if there is
one of that name and all that have it passed.
"""

import hashlib
import hmac
import json
from typing import Any
from xml.etree import ElementTree

from msgspec import Struct

from polar.errors import PolarError

_LONGEST = 64 * 1024 * 1024


class Result(Struct, frozen=True):
    names: tuple[str, ...]
    outcome: str  # passed, failed, skipped; what fails as it should has passed

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


class Run(Struct, frozen=True):
    results: list[Result]
    complete: bool = True  # every test that was found was run, and every file was read

    @property
    def share(self) -> float:
        """Of the tests that ran, how many passed; those that were skipped don't count."""
        ran = [result for result in self.results if result.outcome != "skipped"]
        return sum(result.passed for result in ran) / len(ran) if ran and self.complete else 0.0


class BrokenResults(PolarError):
    """What a run left tells of no run that went as it should: the doing of what ran."""


class Judged(Struct, frozen=True):
    """Named tests, by whether they passed."""

    passed: list[str]
    failed: list[str]

    @property
    def share(self) -> float:
        """Of those named, how many passed; 1 where none is named."""
        every = len(self.passed) + len(self.failed)
        return len(self.passed) / every if every else 1.0


def judge(results: list[Result], named: list[str]) -> Judged:
    """A test that isn't there has failed."""
    by_name: dict[str, list[Result]] = {}
    for result in results:
        for name in {name for told in result.names for name in spellings(told)}:
            by_name.setdefault(name, []).append(result)
    judged = Judged([], [])
    for name in named:
        found = by_name.get(name) or by_name.get(dotted(name), [])
        (judged.passed if found and all(result.passed for result in found) else judged.failed).append(name)
    return judged


def spellings(name: str) -> list[str]:
    """A node id of pytest's also goes by its last part, as some datasets have it (`a/test_b.py::C::test_d` is
    `test_d`), and by what stands before its first space, where SWE-bench cuts names off (`a/test_b.py::test_d[x`)."""
    _, separator, test = name.rpartition("::")
    return [name, test, dotted(name), name.split()[0]] if separator else [name]


def dotted(name: str) -> str:
    """A node id of pytest's as its JUnit files have it: `a.test_b.C::test_d`."""
    place, separator, test = name.rpartition("::")
    file, _, classes = place.partition("::")
    owner = ".".join([file.removesuffix(".py").replace("/", "."), *(classes.split("::") if classes else [])])
    return f"{owner}::{test}" if separator else name


def files_of(named: list[str]) -> list[str]:
    """The files of tests that are named as pytest does, each once."""
    return list(dict.fromkeys(name.partition("::")[0] for name in named if "::" in name))


def signed(data: bytes, secret: str) -> Run:
    """What reporter.py wrote. Raises BrokenResults where the run did not end by itself, or not everything is its."""
    key = hmac.new(secret.encode(), digestmod=hashlib.sha256)
    latest: dict[tuple[str, ...], Result] = {}
    finished: int | None = None
    collected = 0
    complete = True
    for number, line in enumerate(data.splitlines()):
        mark, _, text = line.partition(b" ")
        expected = key.copy()
        expected.update(b"%d " % number + text)
        if not hmac.compare_digest(mark, expected.hexdigest().encode()) or finished is not None:
            raise BrokenResults("The results were written to by something else than the run of the tests.")
        record: dict[str, Any] = json.loads(text)
        if "tampered" in record:
            raise BrokenResults(f"Code of the workspace exchanged {record['tampered']}.")
        if "finished" in record:
            finished = record["finished"]
        elif "collected" in record:
            collected = record["collected"]
        elif "not_collected" in record:
            complete = False
        else:
            result = Result(tuple(record["names"]), record["outcome"])
            latest[result.names] = result  # a test may be run again
    if finished is None:
        raise BrokenResults("The tests did not run to their end.")
    return Run(list(latest.values()), complete and len(latest) >= collected)


def junit(data: bytes) -> Run:
    """The test cases of a JUnit file. It may have been written by anybody."""
    if len(data) > _LONGEST or b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise BrokenResults("The JUnit file is too long, or declares entities.")
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise BrokenResults(f"The JUnit file can't be read: {error}.") from error
    return Run([_case(case) for case in root.iter("testcase")])


def _case(case: ElementTree.Element) -> Result:
    owner, name = case.get("classname", ""), case.get("name", "")
    outcome = "passed"
    if case.find("failure") is not None or case.find("error") is not None:
        outcome = "failed"
    elif case.find("skipped") is not None:
        outcome = "skipped"
    file = case.get("file")
    names = [f"{owner}::{name}", f"{owner}.{name}", *([f"{file}::{name}"] if file else [])]
    return Result(tuple(names) if owner else (name, *names[2:]), outcome)
