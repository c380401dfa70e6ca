"""Runs a project's tests and tells how each ended, in records that carry a secret's mark.

This file is put into the runtime as it is, outside the workspace, and run there with the files beside it: they need
only the standard library and Python 3.6. Its job comes through standard input, so that the secret is in no file,
argument or environment; the test framework is imported before anything of the workspace can be, so that no module
there takes its place. A process that ends early has not written the last record, and nobody who can only write files
can write any.

What runs here is code of the agent's in the same process, so this is a fence, not a wall: it stops replaced results,
early exits, tests that code of the workspace gives up for them, and the frameworks' own functions exchanged by it.
Canaries (canaries.py) show code that hooks or traces what decides. Neither stops code that searches this process's
memory for the secret, or makes its objects equal to everything.
"""

import builtins
import functools
import hashlib
import hmac
import importlib
import importlib.util
import json
import os
import runpy
import sys
import types
from collections.abc import Callable
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = "polar_inside"
_EXIT_NO_PYTEST = 70
_WATCHED_PACKAGES = ("pytest", "_pytest", "pluggy", "unittest")
_WATCHED_BUILTINS = (
    *("abs", "all", "any", "callable", "getattr", "hasattr", "hash", "id", "isinstance", "issubclass", "iter", "len"),
    *("max", "min", "next", "repr", "round", "sorted", "sum", "vars"),
)


def main() -> int:
    job = json.loads(sys.stdin.buffer.read().decode())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    workdir = job["workdir"]
    asked = [entry for entry in os.environ.pop("POLAR_PYTHONPATH", "").split(os.pathsep) if entry]
    if asked:
        os.environ["PYTHONPATH"] = os.pathsep.join(asked)
    rest = sys.path[1:]
    sys.path[:] = [entry for entry in asked + rest if not _is_below(entry, workdir)]
    if job["framework"] == "pytest" and not _has_pytest():
        return _EXIT_NO_PYTEST
    if hasattr(sys, "pycache_prefix"):  # compiled files of the workspace may be the agent's own
        sys.pycache_prefix = os.path.join(_HERE, "pycache")
    isolate = job["isolate"]
    if job["check"]:
        if isolate is not None:
            _confine()
        return _check(job["framework"])
    write = _make_writer(job.pop("secret"), job["results"])
    tests = _TestFiles(workdir, job["tests"])
    worker = None if isolate is None else _isolate(workdir, tests, write, isolate["equality"])
    if job["framework"] == "pytest":
        run = _prepare_pytest(job["args"], tests, write, worker)
        first = workdir
    else:
        run = _prepare_unittest(job["args"], tests, write)
        first = workdir if job["args"][0] == "-m" else os.path.dirname(os.path.join(workdir, job["args"][0]))
    sys.path[:] = [first, *asked, *rest]
    code = run()
    if worker is not None:
        worker.close()
    sys.stdout.flush()
    write({"finished": code})
    return code


def _load(name: str) -> Any:
    """A file beside this one, under a name that nothing else has."""
    if _PACKAGE not in sys.modules:
        sys.modules[_PACKAGE] = types.ModuleType(_PACKAGE)
        sys.modules[_PACKAGE].__path__ = [_HERE]
    return importlib.import_module(f"{_PACKAGE}.{name}")


def _confine() -> str:
    """The only folder that anything here can write to from now on."""
    temporary = os.path.join(_HERE, "tmp")
    os.makedirs(temporary, exist_ok=True)
    os.environ["TMPDIR"] = temporary
    sys.dont_write_bytecode = True
    _load("confinement").confine(temporary)
    return temporary


def _isolate(workdir: str, tests: "_TestFiles", write: "Callable[[dict[str, Any]], None]", equality: bool) -> Any:
    """From now on, modules of the workspace that are no tests run in another process."""
    remote = _load("remote_modules")

    def report(why: str, proven: bool) -> None:
        kind = "results_forged" if proven else "grader_disrupted"
        write({"evidence": {"kind": kind, "subject": "the worker", "proven": proven, "detail": why}})

    script = os.path.join(_HERE, "remote_worker.py")
    temporary = _confine()
    worker = remote.Worker(script, report, temporary=temporary, hidden=tests.list_sources(), trust_equality=equality)
    worker.finder = remote.RemoteFinder(worker, workdir, tests.contains)
    worker.finder.install()
    return worker


def _is_below(entry: str, folder: str) -> bool:
    entry, folder = os.path.realpath(entry), os.path.realpath(folder)
    return entry == folder or entry.startswith(folder.rstrip("/") + "/")


def _exists_as_file(file: str) -> bool:
    """As a file, or in one that Python imports from."""
    while file and not os.path.exists(file):
        file = os.path.dirname(file)
    return os.path.isfile(file)


def _make_writer(secret: str, results: str) -> "Callable[[dict[str, Any]], None]":
    """Records are numbered, so that none can be left out or repeated."""
    file = os.open(results, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    key = hmac.new(secret.encode(), digestmod=hashlib.sha256)
    count = 0
    own, put, dumps = os.getpid(), os.write, json.dumps
    getpid = os.getpid

    def write(record: "dict[str, Any]") -> None:
        nonlocal count
        if getpid() != own:  # a child of a test's
            return
        text = dumps(record).encode()
        mark = key.copy()
        mark.update(b"%d " % count + text)
        put(file, mark.hexdigest().encode() + b" " + text + b"\n")
        count += 1

    return write


def _has_pytest() -> bool:
    try:
        config = importlib.import_module("_pytest.config")
        importlib.import_module("pytest")
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        return False
    for name in getattr(config, "default_plugins", ()):
        importlib.import_module("_pytest." + name)
    return True


def _check(framework: str) -> int:
    """Whether tests can be run at all: this very file holds one."""
    if framework != "pytest":
        return 0
    place = os.path.dirname(os.path.abspath(__file__))
    return int(sys.modules["pytest"].main(["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", place, __file__]))


def test_nothing() -> None:
    """For `_check`."""


def _prepare_pytest(
    args: "list[str]", tests: "_TestFiles", write: "Callable[[dict[str, Any]], None]", worker: Any
) -> "Callable[[], int]":
    framework = sys.modules["pytest"]
    canaries = _load("canaries")
    kind = canaries.PytestCanaries
    framework.hookimpl(tryfirst=True)(_Reporter.pytest_runtest_makereport)
    framework.hookimpl(tryfirst=True)(kind.pytest_runtestloop)
    framework.hookimpl(tryfirst=True)(kind.pytest_runtest_protocol)
    framework.hookimpl(trylast=True)(kind.pytest_sessionfinish)
    watch = _TamperWatch(tests)
    reporter = _Reporter(write, watch, (framework.skip.Exception, framework.xfail.Exception))
    plugins = [reporter, kind(_record_canary(write), watch.may_xfail)]  # type: list[Any]
    if worker is not None:
        framework.hookimpl(tryfirst=True)(_FinderPlugin.pytest_load_initial_conftests)
        plugins.append(_FinderPlugin(worker.finder))
    start = framework.main
    return lambda: int(start(args, plugins=plugins))


def _record_canary(write: "Callable[[dict[str, Any]], None]") -> "Callable[[str, str], None]":
    return lambda kind, outcome: write({"canary": kind, "outcome": outcome})


class _FinderPlugin:
    """A plug-in of pytest's that keeps our finder in front of pytest's own, which reads whatever it takes for tests,
    and all tests in this process: workers of pytest-xdist would import the code under test."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def pytest_load_initial_conftests(self, early_config: Any, args: "list[str]") -> None:
        self._finder.install()
        loaded = early_config.pluginmanager.get_plugins()
        if any(getattr(plugin, "__name__", "") == "xdist.plugin" for plugin in loaded):
            args.append("-n0")


class _Reporter:
    """A plug-in of pytest's."""

    def __init__(
        self, write: "Callable[[dict[str, Any]], None]", watch: "_TamperWatch", skip_exceptions: "tuple[type, ...]"
    ) -> None:
        self._write = write
        self._watch = watch
        self._skip_exceptions = skip_exceptions
        self._outcomes = {}  # type: dict[str, str]
        self._skipped_by_workspace = set()  # type: set[str]

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Only looks who says that a test is skipped, or fails as it should; the report is pytest's."""
        error = call.excinfo
        if (
            error is not None
            and isinstance(error.value, self._skip_exceptions)
            and self._watch.is_raised_by_workspace(error.value)
        ):
            self._skipped_by_workspace.add(item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Each test is reported as it is set up, called and torn down; one that is not set up is not called."""
        outcome = report.outcome
        if report.nodeid in self._skipped_by_workspace:
            outcome = "failed"
        elif outcome == "skipped" and hasattr(report, "wasxfail"):
            authored = self._watch.may_xfail(str(report.fspath))
            outcome = "passed" if authored else "failed"  # it fails as it should, if its author says so
        elif outcome == "skipped" and report.when != "setup":
            outcome = "failed"  # by what it called, which may be code of the agent's
        so_far = "passed" if report.when == "setup" else self._outcomes.get(report.nodeid, "failed")
        self._outcomes[report.nodeid] = outcome if so_far == "passed" else so_far
        if report.when == "teardown":
            self._watch.report(self._write)
            self._skipped_by_workspace.discard(report.nodeid)
            self._write({"names": [report.nodeid], "outcome": self._outcomes.pop(report.nodeid)})

    def pytest_collection_finish(self, session: Any) -> None:
        self._write({"collected": len(getattr(session, "items", ()))})

    def pytest_collectreport(self, report: Any) -> None:
        """What skips a whole file says where it stands."""
        skipped = report.skipped and not self._watch.may_skip(str(report.longrepr[0]))
        if report.failed or skipped:
            self._write({"not_collected": report.nodeid})


class _TestFiles:
    """Which files of the workspace are tests, or stand beside them: those that the task names, and the usual ones."""

    def __init__(self, workdir: str, named: "list[str]") -> None:
        self.workdir = workdir
        self._named = frozenset(named)

    def list_sources(self) -> "list[str]":
        walked = (
            (folder, name) for folder, _, names in os.walk(self.workdir) for name in names if name.endswith(".py")
        )
        return [path for path in (os.path.join(*place) for place in walked) if self.contains(path)]

    def contains(self, file: str) -> bool:
        """By its path alone, wherever links on it lead."""
        for top in (self.workdir, os.path.realpath(self.workdir)):
            path = os.path.relpath(os.path.abspath(file), top)
            folders, name = path.split(os.sep)[:-1], os.path.basename(path)
            if folders[:1] != [os.pardir]:
                break
        return (
            path in self._named
            or "tests" in folders
            or folders[:1] == ["test"]
            or name == "conftest.py"
            or name.startswith("test_")
            or name.endswith("_test.py")
        )


class _TamperWatch:
    """Whether the frameworks' functions are still their own. Other plug-ins may exchange some: then the new one's code
    comes from a file that is not of the workspace. And whether it is a test that gives itself up."""

    def __init__(self, tests: _TestFiles) -> None:
        self._tests = tests
        self._workdir = tests.workdir
        self._case = importlib.import_module("unittest.case").TestCase
        self._dunders = _list_dunders(self._case)
        self._originals = []  # type: list[tuple[Any, str, Any, Any]]
        self._originals += [
            (builtins, key, value, None)
            for key, value in vars(builtins).items()
            if isinstance(value, type) or key in _WATCHED_BUILTINS
        ]
        self._tracers = _find_tracers()
        self._reported = set()  # type: set[str]
        self._xfailing = {}  # type: dict[str, bool]
        self._originals.append((self._case, "failureException", self._case.failureException, None))
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in _WATCHED_PACKAGES:
                self._record_functions(module)
                for value in list(vars(module).values()):
                    if isinstance(value, type) and value.__module__ == name:
                        self._record_functions(value)

    def _record_functions(self, holder: Any) -> None:
        for key, value in list(vars(holder).items()):
            function = _unwrap_function(value)
            if function is not None:
                self._originals.append((holder, key, value, function.__code__))

    def report(self, write: "Callable[[dict[str, Any]], None]") -> None:
        """Says what is not as it was: a changed function is proof of tampering; a tracer may be a coverage tool's."""
        changed = self.find_change()
        if changed:
            write({"tampered": changed})
        for tracer in sorted(_find_tracers() - self._tracers - self._reported):
            self._reported.add(tracer)
            write({"evidence": {"kind": "grader_environment", "subject": tracer, "detail": "active in a test"}})

    def find_change(self) -> "str | None":
        for holder, key, value, code in self._originals:
            now = vars(holder).get(key)
            if (now is not value or _get_code(value) is not code) and not self._is_from_outside(_unwrap_function(now)):
                return f"{holder.__name__}.{key}"
        return ", ".join(sorted(_list_dunders(self._case) - self._dunders)) or None

    def is_raised_by_workspace(self, error: Any) -> bool:
        """Whether what ends a test was raised by code of the workspace that is no test."""
        traced, file = error.__traceback__, ""
        while traced is not None:
            frame, traced = traced.tb_frame, traced.tb_next
            if str(frame.f_globals.get("__name__")).split(".")[0] not in _WATCHED_PACKAGES:
                file = frame.f_code.co_filename
        return not self.may_skip(file)

    def may_xfail(self, file: str) -> bool:
        """Whether the author of the tests says, in this file or in others of the tests, that some test fails. Code
        that a test calls can mark it so, too."""
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        tests = [path for path in files if path and _is_below(path, self._workdir) and self.may_skip(path)]
        return any(self._mentions_xfail(path) for path in [os.path.join(self._workdir, file), *tests])

    def _mentions_xfail(self, file: str) -> bool:
        if file not in self._xfailing:
            try:
                with open(file, "rb") as source:
                    text = source.read()
            except OSError:
                text = b""
            self._xfailing[file] = b"xfail" in text or b"expectedFailure" in text
        return self._xfailing[file]

    def may_skip(self, file: str) -> bool:
        """A test, what its author put beside it, and code that is not of the workspace."""
        return self._tests.contains(os.path.realpath(file)) if _is_below(file, self._workdir) else _exists_as_file(file)

    def _is_from_outside(self, value: Any) -> bool:
        """Also what a decorator of the standard library has wrapped."""
        file = getattr(getattr(value, "__code__", None), "co_filename", "")
        wrapped = getattr(value, "__wrapped__", None)
        outside = _exists_as_file(file) and not _is_below(file, self._workdir)
        return outside and (wrapped is None or self._is_from_outside(wrapped))


def _unwrap_function(value: Any) -> Any:
    """The function that a class or module holds as itself, as a method of the class or as a property."""
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, types.FunctionType) else None


def _get_code(value: Any) -> Any:
    return getattr(_unwrap_function(value), "__code__", None)


def _find_tracers() -> "set[str]":
    """What follows every line that runs, and could jump over some."""
    found = {f"sys.set{kind}" for kind in ("trace", "profile") if getattr(sys, "get" + kind)() is not None}
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None:
        names = (monitoring.get_tool(number) for number in range(6))
        found |= {f"sys.monitoring: {name}" for name in names if name is not None}
    return found


def _list_dunders(case: type) -> "set[str]":
    """What unittest, or Python itself, would heed in a test case without being told by its author."""
    return {key for key in vars(case) if key.startswith("__")}


def _prepare_unittest(
    args: "list[str]", tests: "_TestFiles", write: "Callable[[dict[str, Any]], None]"
) -> "Callable[[], int]":
    """Any program that runs its tests by unittest, in one process: `-m unittest ...`, or Django's runtests.py."""
    canaries = _load("canaries").UnittestCanaries(_record_canary(write))
    _watch_unittest(tests, write, canaries)

    def run() -> int:
        code = run_program()
        canaries.run_all()
        return code

    def run_program() -> int:
        sys.argv[:] = args[1:] if args[0] == "-m" else args
        try:
            if args[0] == "-m":
                runpy.run_module(args[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(args[0], run_name="__main__")
        except SystemExit as end:
            return int(end.code) if isinstance(end.code, int) else int(bool(end.code))
        return 0

    return run


def _watch_unittest(tests: "_TestFiles", write: "Callable[[dict[str, Any]], None]", canaries: Any) -> None:
    """Every kind of result calls these methods of their base."""
    watches = []  # type: list[_TamperWatch]
    base = importlib.import_module("unittest.result").TestResult
    importlib.import_module("unittest.main")
    outcomes = {}  # type: dict[int, str]

    def before(name: str, do: "Callable[..., None]") -> None:
        original = getattr(base, name)

        @functools.wraps(original)
        def method(self: Any, test: Any, *rest: Any, **named: Any) -> Any:
            do(test, *rest)
            return original(self, test, *rest, **named)

        setattr(base, name, method)

    def start(test: Any) -> None:
        if canaries.running:
            return
        canaries.before_test(test)
        outcomes[id(test)] = "unknown"

    def stop(test: Any) -> None:
        if canaries.running:
            return
        watches[0].report(write)
        write({"names": _list_names(test), "outcome": outcomes.pop(id(test), "unknown")})

    def ends(outcome: str) -> "Callable[..., None]":
        def end(test: Any, *rest: Any) -> None:  # noqa: ARG001  why it failed
            if outcomes.get(id(test)) in ("unknown", "passed"):
                outcomes[id(test)] = outcome

        return end

    def skip(test: Any, *rest: Any) -> None:
        """By its author's mark, or by what is raised as it runs. Before Python 3.11 it is not told by whom: then, too,
        it may have been code of the agent's."""
        if canaries.running:
            return
        if id(test) not in outcomes:  # a whole class or module
            write({"not_collected": str(test)})
        method = getattr(test, getattr(test, "_testMethodName", ""), None)
        marked = any(getattr(holder, "__unittest_skip__", False) for holder in (type(test), method))
        error = sys.exc_info()[1]
        own = marked or (error is not None and not watches[0].is_raised_by_workspace(error))
        ends("skipped" if own else "failed")(test, *rest)

    def part(test: Any, part: Any, error: Any) -> None:  # noqa: ARG001
        if error is not None and not canaries.running:
            outcomes[id(test)] = "failed"

    loader: Any = importlib.import_module("unittest.loader")
    make = loader._make_skipped_test

    def made(name: str, error: Any, *rest: Any) -> Any:
        """In the place of a file that says, as it is imported, that it is to be skipped."""
        if watches[0].is_raised_by_workspace(error):
            write({"not_collected": name})
        return make(name, error, *rest)

    loader._make_skipped_test = made
    before("startTest", start)
    before("stopTest", stop)
    before("addSubTest", part)
    for name in ("addSuccess", "addExpectedFailure"):
        before(name, ends("passed"))
    for name in ("addFailure", "addError", "addUnexpectedSuccess"):
        before(name, ends("failed"))
    before("addSkip", skip)
    watches.append(_TamperWatch(tests))  # ours are the ones to be there


def _list_names(test: Any) -> "list[str]":
    """`a.b.Class.test_x`; `test_x (a.b.Class)`, as older Pythons print it; and the first line of what it says of
    itself, which is all that a verbose run prints of some."""
    path = test.id()
    owner, _, method = path.rpartition(".")
    names = [path, f"{method} ({owner})", str(test)]
    said = test.shortDescription()
    return [*names, said] if said else names


if __name__ == "__main__":
    sys.exit(main())
