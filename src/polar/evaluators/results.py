"""How each test of a run ended, and what that says of the tests that a task names.

A test has several names: datasets and tools write them differently. One that is named counts as passed if there is
one of that name and all that have it passed.
"""

import hashlib
import hmac
import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

from msgspec import Struct

from polar.errors import PolarError
from polar.records.session import Evidence, EvidenceKind

_MAX_JUNIT_BYTES = 64 << 20  # of all files of a run
_MAX_JUNIT_DEPTH = 100
_MAX_RECORD_BYTES = 1 << 20
_MAX_TESTS = 500_000
_CHUNK_BYTES = 1 << 20


class CaseResult(Struct, frozen=True):
    names: tuple[str, ...]
    outcome: str  # passed, failed, skipped; what fails as it should has passed

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


class RunResults(Struct, frozen=True):
    results: list[CaseResult]
    is_complete: bool = True  # every test that was found was run, and every file was read
    evidence: list[Evidence] = []

    @property
    def passed_share(self) -> float:
        """Of the tests that ran, how many passed; those that were skipped don't count."""
        ran = [result for result in self.results if result.outcome != "skipped"]
        return sum(result.passed for result in ran) / len(ran) if ran and self.is_complete else 0.0


class BrokenResultsError(PolarError):
    """What a run left tells of no run that went as it should: the doing of what ran."""

    def __init__(self, message: str, *evidence: Evidence) -> None:
        super().__init__(message)
        self.evidence = list(evidence)

    @classmethod
    def with_proof(cls, kind: EvidenceKind, subject: str, message: str) -> "BrokenResultsError":
        return cls(message, Evidence(kind, subject, proven=True, detail=message))


class NamedOutcomes(Struct, frozen=True):
    """Named tests, by whether they passed."""

    passed: list[str]
    failed: list[str]

    @property
    def passed_share(self) -> float:
        """Of those named, how many passed; 1 where none is named."""
        every = len(self.passed) + len(self.failed)
        return len(self.passed) / every if every else 1.0


def match_named_tests(results: list[CaseResult], named: list[str]) -> NamedOutcomes:
    """A test that isn't there has failed."""
    by_name: dict[str, list[CaseResult]] = {}
    for result in results:
        for name in {name for own_name in result.names for name in list_spellings(own_name)}:
            by_name.setdefault(name, []).append(result)
    judged = NamedOutcomes([], [])
    for name in named:
        found = by_name.get(name) or by_name.get(to_dotted(name), [])
        (judged.passed if found and all(result.passed for result in found) else judged.failed).append(name)
    return judged


def list_spellings(name: str) -> list[str]:
    """A node id of pytest's also goes by its last part, as some datasets have it (`a/test_b.py::C::test_d` is
    `test_d`), and by what stands before its first space, where SWE-bench cuts names off (`a/test_b.py::test_d[x`)."""
    _, separator, test = name.rpartition("::")
    return [name, test, to_dotted(name), name.split()[0]] if separator else [name]


def to_dotted(name: str) -> str:
    """A node id of pytest's as its JUnit files have it: `a.test_b.C::test_d`."""
    place, separator, test = name.rpartition("::")
    file, _, classes = place.partition("::")
    owner = ".".join([file.removesuffix(".py").replace("/", "."), *(classes.split("::") if classes else [])])
    return f"{owner}::{test}" if separator else name


def list_node_files(named: list[str]) -> list[str]:
    """The files of tests that are named as pytest does, each once."""
    return list(dict.fromkeys(name.partition("::")[0] for name in named if "::" in name))


def guess_test_files(named: list[str]) -> list[str]:
    """Every path that may be the file of one of these tests: `a/b.py::test_c`, or `a.b.Case.test_c`."""
    found: list[str] = []
    for name in named:
        place = re.sub(r".* \((.*)\)$", r"\1", name).partition("::")[0]
        if place.endswith(".py"):
            found.append(posixpath.normpath(place))
        elif re.fullmatch(r"\w+(\.\w+)*", place):
            parts = place.split(".")
            found += ["/".join(parts[:count]) + ".py" for count in range(1, len(parts) + 1)]
    return list(dict.fromkeys(found))


def parse_signed_results(file: Path, secret: str) -> RunResults:
    """What reporter.py wrote, read line by line: call it off the event loop. Raises BrokenResultsError where the run
    did not end by itself, or not everything is its."""
    run = _RecordReader()
    with file.open("rb") as lines:
        for text in _read_signed(lines, secret):
            try:
                run.add(json.loads(text))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise _make_forgery_error(
                    "The results have a record that the run of the tests never writes."
                ) from error
    return run.finish()


def _read_signed(lines: BinaryIO, secret: str) -> Iterator[bytes]:
    """Each record's JSON."""
    key = hmac.new(secret.encode(), digestmod=hashlib.sha256)
    number = 0
    while line := lines.readline(_MAX_RECORD_BYTES):
        if not line.endswith(b"\n"):
            if len(line) == _MAX_RECORD_BYTES:
                message = f"A record of the results is longer than {_MAX_RECORD_BYTES} bytes."
                raise BrokenResultsError(message, _make_disruption(message))
            # a run that was killed may have left a part of a line
            raise BrokenResultsError(
                "The results end in the middle of a record.", _make_disruption("The last record is cut off.")
            )
        mark, _, text = line[:-1].partition(b" ")
        expected = key.copy()
        expected.update(b"%d " % number + text)
        if not hmac.compare_digest(mark, expected.hexdigest().encode()):
            raise _make_forgery_error("The results were written to by something else than the run of the tests.")
        yield text
        number += 1


class _RecordReader:
    """Follows the records of one run, in the order in which they were written."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, ...], CaseResult] = {}
        self._evidence: list[Evidence] = []
        self._collected = 0
        self._complete = True
        self._finished = False
        self._canaries_before = self._canaries_after = 0  # the first result, and the last

    def add(self, record: dict[str, Any]) -> None:
        if self._finished:
            raise _make_forgery_error("There are results behind the end of the run.")
        if "tampered" in record:
            changed = record["tampered"]
            raise BrokenResultsError.with_proof(
                "grader_environment", changed, f"Code of the workspace exchanged {changed}."
            )
        if "evidence" in record:
            self._add_evidence(Evidence(**record["evidence"]))
        elif "canary" in record:
            self._add_canary(record["canary"], record["outcome"])
        elif "finished" in record:
            self._finished = True
        elif "collected" in record:
            self._collected = record["collected"]
        elif "not_collected" in record:
            self._complete = False
        else:
            result = CaseResult(tuple(record["names"]), record["outcome"])
            self._latest[result.names] = result  # a test may be run again
            _check_count(len(self._latest))
            self._canaries_after = 0

    def _add_evidence(self, evidence: Evidence) -> None:
        if evidence.proven:
            raise BrokenResultsError(evidence.detail or evidence.subject, *self._evidence, evidence)
        self._evidence.append(evidence)

    def _add_canary(self, kind: str, outcome: str) -> None:
        if outcome == "passed":
            raise BrokenResultsError.with_proof(
                "canary_passed", kind, f"A test that must fail ({kind}) was reported as passed."
            )
        self._canaries_before += not self._latest
        self._canaries_after += 1

    def finish(self) -> RunResults:
        if not self._finished:
            raise BrokenResultsError(
                "The tests did not run to their end.", _make_disruption("The last record is missing.")
            )
        if self._latest and not (self._canaries_before and self._canaries_after):
            raise BrokenResultsError.with_proof(
                "canary_passed", "missing", "Tests that must fail were left out of the run."
            )
        complete = self._complete and len(self._latest) >= self._collected
        return RunResults(list(self._latest.values()), complete, self._evidence)


def _make_forgery_error(message: str) -> BrokenResultsError:
    return BrokenResultsError.with_proof("results_forged", "results", message)


def _make_disruption(detail: str) -> Evidence:
    """Code that crashes by mistake ends the run as well: this proves nothing."""
    return Evidence("grader_disrupted", "the run of the tests", detail=detail)


def parse_junit(files: Iterable[Path]) -> RunResults:
    """The test cases of a run's JUnit files: call it off the event loop. Anybody may have written them."""
    found: list[CaseResult] = []
    left = _MAX_JUNIT_BYTES
    for file in files:
        parser = ElementTree.XMLParser(target=_JUnitReader(found))
        try:
            with file.open("rb") as data:
                while chunk := data.read(_CHUNK_BYTES):
                    left -= len(chunk)
                    if left < 0:
                        raise BrokenResultsError(f"The JUnit files are larger than {_MAX_JUNIT_BYTES >> 20} MiB.")
                    parser.feed(chunk)
            parser.close()
        except ElementTree.ParseError as error:
            raise BrokenResultsError(f"The JUnit file can't be read: {error}.") from error
    return RunResults(found)


class _JUnitReader:
    """Follows the elements of one file, and holds those alone that are open."""

    def __init__(self, found: list[CaseResult]) -> None:
        self._found = found
        self._open: list[_JUnitCase | None] = []  # None for an element that is no test case

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self._open) >= _MAX_JUNIT_DEPTH:
            raise BrokenResultsError(f"The JUnit file has more than {_MAX_JUNIT_DEPTH} elements within one another.")
        case = self._open[-1] if self._open else None
        if case is not None:
            case.children.add(tag)
        self._open.append(_JUnitCase(attributes) if tag == "testcase" else None)

    def end(self, _tag: str) -> None:
        case = self._open.pop()
        if case is not None:
            self._found.append(case.result())
            _check_count(len(self._found))

    def doctype(self, *_: str | None) -> None:
        raise BrokenResultsError("The JUnit file has a document type, which may declare entities.")

    def close(self) -> None:
        pass


class _JUnitCase:
    def __init__(self, attributes: dict[str, str]) -> None:
        self._attributes = attributes
        self.children: set[str] = set()  # their tags

    def result(self) -> CaseResult:
        owner, name = self._attributes.get("classname", ""), self._attributes.get("name", "")
        outcome = "passed"
        if self.children & {"failure", "error"}:
            outcome = "failed"
        elif "skipped" in self.children:
            outcome = "skipped"
        file = self._attributes.get("file")
        names = [f"{owner}::{name}", f"{owner}.{name}", *([f"{file}::{name}"] if file else [])]
        return CaseResult(tuple(names) if owner else (name, *names[2:]), outcome)


def _check_count(tests: int) -> None:
    if tests > _MAX_TESTS:
        raise BrokenResultsError(f"The results have more than {_MAX_TESTS} tests.")
