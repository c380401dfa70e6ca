"""Tests that must fail, run among a project's own tests by reporter.py.

A canary that is reported as passed shows that the test process no longer tells the truth: something of the code under
test has replaced, traced or hooked what decides there. A canary looks like the test beside it (its file, its name, its
module), so that code which recognises tests by such marks takes it for one.

This file is uploaded into the runtime beside reporter.py. It needs only the standard library and Python 3.6.
"""

import ast
import random
import re
import sys
import types
import unittest
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

FUNCTION_BODIES = {
    "numbers": ["left, right = {a}, {b}", "assert left == right"],
    "texts": ["left, right = 'text {a}', 'text {b}'", "assert left == right"],
    "containers": ["left, right = [{a}, dict(key={b})], [{a}, dict(key={a})]", "assert left == right"],
    "objects": ["left, right = object(), object()", "assert left == right"],
    "truth": ["result = {a} > {b} > {a}", "assert result"],
    "error": ["class Unexpected(Exception): pass", "raise Unexpected({a})"],
    "assert_equal": ["case = unittest.FunctionTestCase(print)", "case.assertEqual({a}, {b})"],
    "not_raised": ["case = unittest.FunctionTestCase(print)", "with case.assertRaises(KeyError):", "    left = {a}"],
}
METHOD_BODIES = {
    "method_equal": ["self.assertEqual({a}, {b})"],
    "method_true": ["self.assertTrue({a} == {b})"],
    "method_fail": ["self.fail('{a}')"],
    "method_not_raised": ["with self.assertRaises(KeyError):", "    left = {a}"],
    "sub_test": ["with self.subTest(case={a}):", "    self.assertEqual({a}, {b})"],
}

if TYPE_CHECKING:
    Record = Callable[[str, str], None]
    """Takes a canary's kind and its outcome: failed, as it should; passed; skipped; error where it could not be run."""


def make_canary(kind: str, name: str, file: str, module: str) -> Any:
    """A function that must raise. It says that it is defined in `file` and `module`."""
    a, b = random.sample(range(10**6, 10**9), 2)
    lines = [line.format(a=a, b=b) for line in (FUNCTION_BODIES.get(kind) or METHOD_BODIES[kind])]
    source = "def canary({}):\n".format("self" if kind in METHOD_BODIES else "")
    tree = ast.parse(source + "".join(f"    {line}\n" for line in lines))
    tree.body[0].name = name  # type: ignore[attr-defined]
    ast.increment_lineno(tree, random.randrange(10, 200))
    scope = {"__name__": module, "__file__": file, "unittest": unittest}  # type: dict[str, Any]
    exec(compile(tree, file, "exec"), scope)
    return scope[name]


def make_similar_name(name: str) -> str:
    """A test's name, with a number that no test has."""
    stem = re.sub(r"\W.*", "", name) or "test"
    return f"{stem}_{random.randrange(10**6, 10**9)}"


class PytestCanaries:
    """A plug-in of pytest's. Canaries are run beside the items, without their reports being announced: they count
    neither as failures of the run nor for `-x`."""

    def __init__(self, record: "Record", may_xfail: "Callable[[str], bool]") -> None:
        self._record = record
        self._may_xfail = may_xfail
        self._runner = sys.modules["_pytest.runner"]
        self._run_protocol = self._runner.runtestprotocol
        self._item_class = _make_item_class(sys.modules["pytest"].Item)
        self._started = 0
        self._session = None  # type: Any
        self._first = None  # type: Any

    def pytest_runtestloop(self, session: Any) -> None:
        self._session = session
        self._first = next(iter(getattr(session, "items", ())), None)  # xdist has them elsewhere
        for kind in FUNCTION_BODIES:
            self._run_one(kind, session, self._first, self._first)

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:  # noqa: ARG002  a hook's parameters
        self._started += 1
        if self._started & (self._started - 1) == 0:  # 1, 2, 4, 8, ...
            self._run_one(random.choice(list(FUNCTION_BODIES)), item.parent, item, item)

    def pytest_sessionfinish(self, session: Any) -> None:
        if self._session is not None:
            for kind in FUNCTION_BODIES:
                self._run_one(kind, session, self._first, None)

    def _run_one(self, kind: str, parent: Any, neighbor: Any, next_item: Any) -> None:
        file = str(getattr(neighbor, "fspath", "") or __file__)
        module = getattr(getattr(neighbor, "module", None), "__name__", "tests")
        function = make_canary(kind, make_similar_name(getattr(neighbor, "name", "test")), file, module)
        try:
            item = _make_item(self._item_class, parent, function)
            reports = self._run_protocol(item, log=False, nextitem=next_item)
        except Exception:  # noqa: BLE001  a plug-in that can't take such an item
            self._record(kind, "error")
            return
        self._record(kind, self._get_outcome(reports, file))

    def _get_outcome(self, reports: Any, file: str) -> str:
        outcomes = [report.outcome for report in reports]
        if "failed" in outcomes:
            return "failed"
        if any(hasattr(report, "wasxfail") for report in reports):
            return "skipped" if self._may_xfail(file) else "passed"
        return "skipped" if "skipped" in outcomes else "passed"


def _make_item_class(base: Any) -> Any:
    class TestItem(base):  # type: ignore[misc]
        function = None  # type: Any

        def runtest(self) -> None:
            self.function()

        def repr_failure(self, excinfo: Any, style: Any = None) -> str:  # noqa: ARG002  a hook's parameters
            return "failed"

        def reportinfo(self) -> Any:
            return self.fspath, 0, self.name

    return TestItem


def _make_item(kind: Any, parent: Any, function: Any) -> Any:
    name = function.__name__
    item = kind.from_parent(parent, name=name) if hasattr(kind, "from_parent") else kind(name, parent)
    item.function = function
    return item


class UnittestCanaries:
    def __init__(self, record: "Record") -> None:
        self._record = record
        self._case = unittest.TestCase
        self._result = unittest.TestResult
        self._started = 0
        self._neighbor = None  # type: Any
        self._running = False

    @property
    def running(self) -> bool:
        """Whether results that are reported now are a canary's."""
        return self._running

    def before_test(self, test: Any) -> None:
        self._started += 1
        self._neighbor = test
        if self._started == 1:
            self.run_all()
        elif self._started & (self._started - 1) == 0:
            self._run_one(random.choice(list(METHOD_BODIES)))

    def run_all(self) -> None:
        if self._neighbor is not None:
            for kind in METHOD_BODIES:
                self._run_one(kind)

    def _run_one(self, kind: str) -> None:
        like = type(self._neighbor)
        module = sys.modules.get(like.__module__)
        file = getattr(module, "__file__", None) or __file__
        name = make_similar_name(getattr(self._neighbor, "_testMethodName", "test"))
        method = make_canary(kind, name, file, like.__module__)
        scope = {name: method, "__module__": like.__module__, "__qualname__": like.__qualname__}
        case = types.new_class(like.__name__, (self._case,), exec_body=lambda body: body.update(scope))(name)
        result = self._result()
        self._running = True
        try:
            case.run(result)
        except Exception:  # noqa: BLE001  whatever it is, it did not pass
            self._record(kind, "error")
            return
        finally:
            self._running = False
        failed = len(result.failures) + len(result.errors)
        skipped = len(result.skipped)
        self._record(kind, "failed" if failed else "skipped" if skipped else "passed")
