"""Modules of the code under test, used by tests while they run in a worker process (remote_worker.py).

    test process                                   worker process
    import calc          RemoteFinder   --------->  imports calc
    calc.add(2, 3)       RemoteObject   -- call -->  calls it, encodes the result
    assert 5 == 5        plain data     <-- 5 -----

Plain data is copied: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range,
slice and a few value types of the standard library, by their exact types; and instances of Python's own exceptions.
Lists, dicts, sets and bytearrays that a call changes are changed here too. Everything else stays in the worker, and a
RemoteObject refers to it. Tests can hand functions, iterators and open files to the code under test, which can call,
exhaust and read or write them, and nothing else of the test process.

*Trust.* Every byte from the worker may be forged. It is decoded into plain data and references only, by a codec with
bounds; nothing is unpickled or evaluated. No operator that compares is decided by the worker: a remote object equals
nothing that is plain, and two of them can't be compared (unless `trust_equality`), since code that gives objects which
are equal to everything would pass any test.

This file is uploaded into the runtime beside reporter.py, and used by both processes. It needs only the standard
library and Python 3.8.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import io
import os
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

# Relative, since it is loaded under another name inside runtimes.
from .remote_codec import EXCEPTIONS, Connection, NotPlainError, ProtocolError, decode, encode, make_exception

MAX_TRACEBACK_CHARS = 8192  # of tracebacks, in characters
_MAX_BASES = 32


# What tests see


class RemoteTraceback(Exception):
    """Where the code under test raised: the cause of what is raised in the test."""


class RemoteNamespace(Mapping):  # type: ignore[type-arg]  # Python 3.8
    """The `__dict__` of a remote class or module, where tools that replace attributes look for the old ones."""

    def __init__(self, worker: Worker, remote: Any, local: Mapping[str, Any]) -> None:
        self._worker = worker
        self._remote = remote
        self._local = local

    def __getitem__(self, name: str) -> Any:
        if _is_dunder(name):
            return self._local[name]
        if name not in self._list_own_names():
            raise KeyError(name)
        return self._worker.request("get", self._remote, name)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._local if _is_dunder(name))
        yield from (name for name in self._list_own_names() if not _is_dunder(name))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _list_own_names(self) -> list[str]:
        return self._worker.list_names(self._remote, own=True)


class RemoteType(type):
    """A class of the code under test."""

    _polar_type: int
    _polar_worker: Worker | None = None

    @property  # type: ignore[misc]
    def __dict__(cls) -> Any:  # type: ignore[override]
        local: Any = type.__dict__["__dict__"].__get__(cls)
        worker = local.get("_polar_worker")
        return local if worker is None else RemoteNamespace(worker, cls, local)

    def __call__(cls, *args: Any, **named: Any) -> Any:
        if cls._polar_worker is None:
            raise TypeError("Objects of the code under test are only made by it.")
        return cls._polar_worker.call(cls, args, named)

    def __getattr__(cls, name: str) -> Any:
        if cls._polar_worker is None or not _is_allowed(name):
            raise AttributeError(name)
        return cls._polar_worker.request("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if cls._polar_worker is None or _is_dunder(name):
            super().__setattr__(name, value)
        else:
            cls._polar_worker.request("set", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        if cls._polar_worker is None:
            raise AttributeError(name)
        cls._polar_worker.request("delete", cls, name)

    def __iter__(cls) -> Any:
        return iter(cls._require_worker().request("operate", cls, "__iter__", ()))

    def __getitem__(cls, key: Any) -> Any:
        return cls._require_worker().request("operate", cls, "__getitem__", (key,))

    def __len__(cls) -> Any:
        return cls._require_worker().request("operate", cls, "__len__", ())

    def __bool__(cls) -> bool:
        return True

    def __dir__(cls) -> list[str]:
        return [] if cls._polar_worker is None else cls._polar_worker.list_names(cls)

    def _require_worker(cls) -> Worker:
        if cls._polar_worker is None:
            raise TypeError("This is no class of the code under test.")
        return cls._polar_worker


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


_ALLOWED_DUNDERS = (
    *("__name__", "__qualname__", "__doc__", "__dict__", "__all__", "__version__", "__author__", "__notes__"),
    *("__annotations__", "__members__", "__self__", "__func__", "__defaults__", "__wrapped__"),
)


def _is_allowed(name: str) -> bool:
    """Names of protocols are not: numpy, say, would read memory where an `__array_interface__` tells it to."""
    return not _is_dunder(name) or name in _ALLOWED_DUNDERS


class RemoteObject(metaclass=RemoteType):
    """Something in the worker. A subclass for each of its types has the operators of that type."""

    _polar_handle: int

    def __getattr__(self, name: str) -> Any:
        if not _is_allowed(name) or name.startswith("_polar_"):
            raise AttributeError(name)
        try:
            return _worker(self).request("get", self, name)
        except WorkerDiedError:
            if _is_dunder(name):  # asked for by whatever prints a failure
                raise AttributeError(name) from None
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_dunder(name):
            object.__setattr__(self, name, value)
        else:
            _worker(self).request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        _worker(self).request("delete", self, name)

    def __dir__(self) -> list[str]:
        return _worker(self).list_names(self)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return _worker(self).request("get", self, "__dict__")

    def __repr__(self) -> str:
        return _text(_worker(self).request("operate", self, "__repr__", ()))

    def __str__(self) -> str:
        return _text(_worker(self).request("operate", self, "__str__", ()))

    def __format__(self, form: str) -> str:
        return _text(_worker(self).request("operate", self, "__format__", (form,)))

    def __hash__(self) -> int:
        return hash(self._polar_handle)

    def __eq__(self, other: Any) -> Any:
        return _compare(self, "__eq__", other)

    def __ne__(self, other: Any) -> Any:
        return _compare(self, "__ne__", other)

    def __lt__(self, other: Any) -> Any:
        return _decide(self, "__lt__", other)

    def __le__(self, other: Any) -> Any:
        return _decide(self, "__le__", other)

    def __gt__(self, other: Any) -> Any:
        return _decide(self, "__gt__", other)

    def __ge__(self, other: Any) -> Any:
        return _decide(self, "__ge__", other)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("An object of the code under test can't be copied or pickled in the test process.")

    def __del__(self) -> None:
        worker = type(self)._polar_worker
        if worker is not None:
            worker.release(self._polar_handle)


def _worker(remote: Any) -> Worker:
    worker = type(remote)._polar_worker
    if worker is None:
        raise TypeError("This object belongs to no worker.")
    return worker  # type: ignore[no-any-return]


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"The code under test gave a {type(value).__name__} for a text.")
    return value


def _compare(remote: RemoteObject, operator: str, other: Any) -> Any:
    """With plain data it is never equal; the objects of test libraries (`mock.ANY`) decide for themselves."""
    if not isinstance(other, RemoteObject):
        return NotImplemented
    return _decide(remote, operator, other)


def _decide(remote: RemoteObject, operator: str, other: Any) -> Any:
    worker = _worker(remote)
    if not worker.trust_equality:
        raise TypeError(
            f"`{operator}` of an object of the code under test ({type(remote).__name__}) would be decided by that code "
            "itself. Compare plain data: attributes, dict(x), list(x), str(x). (Or set isolate_equality = true.)"
        )
    return worker.request("operate", remote, operator, (other,))


def _forward(operator: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        return _worker(self).request("operate", self, operator, args)

    method.__name__ = operator
    return method


def _guard(operator: str) -> Any:
    """For an operator that test libraries apply to results and expected values: assertAlmostEqual subtracts."""

    def method(self: Any, *args: Any) -> Any:
        return _decide(self, operator, args[0])

    method.__name__ = operator
    return method


def _call(self: Any, *args: Any, **named: Any) -> Any:
    return _worker(self).call(self, args, named)


def _iterate(self: Any) -> Any:
    return _worker(self).request("operate", self, "__iter__", ())


def _await(self: Any) -> Any:
    """The worker runs it to its end, in a loop of its own."""
    return _worker(self).request("await", self)
    yield


def _exit(self: Any, kind: Any, error: Any, traceback: Any) -> Any:  # noqa: ARG001  a context manager's parameters
    """The code under test may not suppress that a test fails."""
    plain = None if error is None else _to_plain_error(error)
    suppressed = _worker(self).request(
        "operate", self, "__exit__", (None if plain is None else type(plain), plain, None)
    )
    return suppressed is True and isinstance(error, Exception) and not isinstance(error, AssertionError)


_BINARY = (
    *("add", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "or", "xor"),
)
_UNARY = ("len", "next", "bool", "int", "float", "complex", "index", "abs", "neg", "pos", "invert", "round", "trunc")
_OTHERS = ("floor", "ceil", "reversed", "getitem", "setitem", "delitem", "enter", "fspath", "bytes")
OPERATORS: dict[str, Any] = {
    **{f"__{name}__": _forward(f"__{name}__") for name in (*_BINARY, *_UNARY, *_OTHERS)},
    **{f"__r{name}__": _forward(f"__r{name}__") for name in _BINARY},
    **{f"__i{name}__": _forward(f"__i{name}__") for name in _BINARY if name != "divmod"},
    **{name: _guard(name) for name in ("__sub__", "__rsub__", "__isub__", "__contains__")},
    "__call__": _call,
    "__iter__": _iterate,
    "__exit__": _exit,
    "__await__": _await,
}
"""What a type in the worker may have that its counterpart in the test process then has, too."""


class RemoteModule(types.ModuleType):
    _polar_worker: Worker
    _polar_remote: RemoteObject

    def __getattr__(self, name: str) -> Any:
        if not _is_allowed(name) or name.startswith("_polar_"):
            raise AttributeError(name)
        return self._polar_worker.request("get", self._polar_remote, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_dunder(name) or name.startswith("_polar_") or isinstance(value, RemoteModule):
            super().__setattr__(name, value)
        else:
            self._polar_worker.request("set", self._polar_remote, name, value)

    def __delattr__(self, name: str) -> None:
        self._polar_worker.request("delete", self._polar_remote, name)

    def __dir__(self) -> list[str]:
        return self._polar_worker.list_names(self._polar_remote)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        local: Any = vars(types.ModuleType)["__dict__"].__get__(self)
        return RemoteNamespace(self._polar_worker, self._polar_remote, local)


# The worker process, as the test process sees it


_FILE_TYPES = (
    io.StringIO,
    io.BytesIO,
    io.TextIOWrapper,
    io.BufferedReader,
    io.BufferedWriter,
    io.BufferedRandom,
    io.FileIO,
)
FILE_METHODS = ("read", "readline", "readlines", "write", "writelines", "seek", "tell", "truncate", "flush", "close")
CALL, ITERATE, FILE = range(3)
"""What the code under test can do with something that a test hands to it."""


class WorkerDiedError(RuntimeError):
    """The process of the code under test has ended, or was given up: nothing of it can be used any more."""


class Worker:
    """Starts with the first import. `report` is called with a sentence when it is lost, and whether that is proof of
    tampering: it sent a message that no honest worker sends. The files in `hidden` can't be read by the worker."""

    def __init__(
        self,
        script: str,
        report: Callable[[str, bool], None],
        *,
        temporary: str,
        hidden: Sequence[str] = (),
        trust_equality: bool = False,
    ) -> None:
        self._hidden = list(hidden)
        self.trust_equality = trust_equality
        self._script = script
        self._report = report
        self.temporary = temporary
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._broken_reason: str | None = None
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._types: dict[int, Any] = {}
        self._lent: list[Any] = []
        self._lent_ids: dict[int, int] = {}
        self._released: list[int] = []
        self._sent_context: tuple[str, dict[str, str]] = ("", {})
        self._failure: BaseException | None = None

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", self._script, str(theirs.fileno())],
                env={**environment, "TMPDIR": self.temporary},
                stdin=subprocess.DEVNULL,
                stdout=2,
                close_fds=True,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._connection.send(encode(self._hidden, self._refer))

    def close(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            if self._connection is not None:
                self._connection.close()
            self._process.kill()
            self._process.wait()

    def release(self, handle: int) -> None:
        self._released.append(handle)

    def import_module(self, name: str) -> tuple[RemoteObject, list[str]]:
        """The module, and the names that `import *` takes."""
        if self._connection is None:
            self.start()
        imported = self.request("import", name, list(sys.path))
        if type(imported) is not tuple or len(imported) != 2:
            self._fail_forged("An import gave no module.")
        module, names = imported
        if not isinstance(module, RemoteObject) or not _are_strings(names):
            self._fail_forged("An import gave no module.")
        return module, names

    def list_names(self, remote: Any, *, own: bool = False) -> list[str]:
        names = self.request("names", remote, own)
        if not _are_strings(names):
            self._fail_forged("A list of names holds something else.")
        return names  # type: ignore[no-any-return]

    def call(self, remote: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return self.request("call", remote, args, named)

    def request(self, operation: str, *operands: Any) -> Any:
        with self._lock:
            if self._broken_reason is not None or self._connection is None or os.getpid() != self._owner:
                raise WorkerDiedError(self._broken_reason or "The code under test can't be used from another process.")
            released, told = self._released, self._sent_context
            try:
                message = encode(("request", operation, operands, released, self._collect_context()), self._refer)
            except NotPlainError:
                self._sent_context = told
                raise
            self._released = []
            try:
                self._connection.send(message)
                return self._await_reply(operation, operands)
            except ProtocolError as error:
                self._fail_forged(str(error))
            except (EOFError, ConnectionError) as error:
                if self._broken_reason is None:
                    self._broken_reason = "The process of the code under test ended."
                    self._report(self._broken_reason, False)
                raise WorkerDiedError(self._broken_reason) from error

    def _fail_forged(self, why: str) -> NoReturn:
        if self._broken_reason is None:
            self._broken_reason = f"The process of the code under test sent a forged message. {why}"
            self._report(self._broken_reason, True)
        raise WorkerDiedError(self._broken_reason)

    def _collect_context(self) -> Any:
        """What the test has changed of its working folder and environment, where it has."""
        folder, environment = os.getcwd(), dict(os.environ)
        before, self._sent_context = self._sent_context, (folder, environment)
        if before == self._sent_context:
            return None
        gone = [name for name in before[1] if name not in environment]
        changed = {name: value for name, value in environment.items() if before[1].get(name) != value}
        changed.pop("TMPDIR", None)
        return folder, changed, gone

    def _await_reply(self, operation: str, operands: tuple[Any, ...]) -> Any:
        while True:
            kind, *parts = self._receive()
            if kind == "value" and len(parts) == 2:
                if operation == "call":
                    _copy_back(operands[1], operands[2], parts[1])
                self._raise_failure()
                return parts[0]
            if kind == "error" and len(parts) == 2:
                self._raise_failure()
                _raise(*parts)
            with self._hold_interrupts():
                self._serve(kind, parts)

    @contextlib.contextmanager
    def _hold_interrupts(self) -> Iterator[None]:
        """Gives the worker up where something else is raised (by a time-out of the test's, say): what it sends next
        would be taken for another reply."""
        try:
            yield
        except (EOFError, ConnectionError, ProtocolError, WorkerDiedError):
            raise
        except BaseException:
            self._broken_reason = "A call of the code under test was interrupted."
            raise

    def _receive(self) -> tuple[Any, ...]:
        assert self._connection is not None
        with self._hold_interrupts():
            message = decode(self._connection.receive(), self._resolve)
        if type(message) is not tuple or not message or type(message[0]) is not str:
            raise ProtocolError("A message is no reply.")
        return message

    def _raise_failure(self) -> None:
        """A test that fails in a function that it handed over has failed, whatever the code under test makes of it."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _serve(self, kind: str, parts: list[Any]) -> None:
        """What the worker may send before its reply."""
        if kind == "output" and len(parts) == 2 and _are_strings(parts):
            stream = sys.stderr if parts[0] == "stderr" else sys.stdout
            stream.write(parts[1].encode("utf-8", "backslashreplace").decode())
        elif kind == "warning" and len(parts) == 2 and _are_strings(parts):
            category = EXCEPTIONS.get(parts[0], UserWarning)
            try:
                warnings.warn(parts[1], category if issubclass(category, Warning) else UserWarning, stacklevel=5)
            except Warning as error:  # where the tests take warnings for errors
                self._failure = self._failure or error
        elif kind == "lent" and [type(part) for part in parts] == [int, str, tuple, dict]:
            self._use_lent(*parts)
        else:
            raise ProtocolError(f"A message is of the unknown kind {kind[:20]!r}.")

    def _use_lent(self, number: int, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Calls what a test handed over. Whatever it raises is raised in the worker."""
        assert self._connection is not None
        if not 0 <= number < len(self._lent):
            raise ProtocolError("A message names nothing that a test handed over.")
        lent = self._lent[number]
        kind = _lent_kind(lent)
        try:
            if kind == CALL and method == "__call__":
                result = lent(*args, **named)
            elif kind == ITERATE and method == "__next__":
                result = next(lent)
            elif kind == FILE and method in FILE_METHODS:
                result = getattr(lent, method)(*args)
            else:
                raise ProtocolError(f"A message asks for {method[:20]!r} of something that a test handed over.")
            answer = encode(("value", result), self._refer)
        except (ProtocolError, WorkerDiedError):
            raise
        except BaseException as error:  # noqa: BLE001  it is raised in the worker
            if isinstance(error, AssertionError) or not isinstance(error, Exception):
                self._failure = error
            answer = encode(("error", _to_plain_error(error)), self._refer)
        self._connection.send(answer)

    def _refer(self, value: Any) -> tuple[bytes, int, int]:
        if isinstance(value, RemoteModule):
            value = value._polar_remote
        if isinstance(value, RemoteType) and value._polar_worker is self:
            return b"c", value._polar_type, 0
        if isinstance(value, RemoteObject):
            return b"h", value._polar_handle, 0
        kind = _lent_kind(value)
        if kind is None:
            raise NotPlainError(
                f"A {type(value).__name__} of the tests can't be handed to the code under test, which runs in another "
                "process: plain data, functions, iterators and open files can."
            )
        if id(value) not in self._lent_ids:
            self._lent_ids[id(value)] = len(self._lent)
            self._lent.append(value)
        return b"k", self._lent_ids[id(value)], kind

    def _resolve(self, tag: bytes, first: int, second: int) -> Any:
        if tag == b"k":
            return self._lent[first]
        if tag == b"c":
            return self._counterpart(first)
        if tag == b"o":
            return _make_remote(self._counterpart(second), first)
        raise ProtocolError("A message refers to something in a way that only tests do.")

    def _counterpart(self, number: int) -> Any:
        """The class here that stands for one in the worker."""
        if number not in self._types:
            described = self._describe(number)
            if number not in self._types:
                self._types[number] = described
        return self._types[number]

    def _describe(self, number: int, depth: int = 0) -> Any:
        described = self.request("describe", number)
        if type(described) is not tuple or len(described) != 4:
            raise ProtocolError("A message describes no class.")
        name, module, bases, operators = described
        if (
            not _are_strings([name, module])
            or type(bases) is not list
            or not _are_strings(operators)
            or depth > _MAX_BASES
        ):
            raise ProtocolError("A message describes no class.")
        own, raised = [], []
        for base in bases[:_MAX_BASES]:
            if type(base) is int and base != number:
                if base not in self._types:
                    self._types[base] = self._describe(base, depth + 1)
                own.append(self._types[base])
            elif type(base) is str and base in EXCEPTIONS:
                raised.append(EXCEPTIONS[base] if issubclass(EXCEPTIONS[base], Exception) else Exception)
        scope = {name: OPERATORS[name] for name in operators if name in OPERATORS}
        return self._make_type(number, name, module, tuple(own or [RemoteObject]), tuple(raised), scope)

    def _make_type(
        self, number: int, name: str, module: str, own: tuple[Any, ...], raised: tuple[Any, ...], scope: dict[str, Any]
    ) -> Any:
        if raised or any(issubclass(base, BaseException) for base in own):
            scope["args"] = property(lambda self: _worker(self).request("get", self, "args"))
        scope["__doc__"] = property(lambda self: _worker(self).request("get", self, "__doc__"))
        scope.update(__module__=module[:200], _polar_type=number, _polar_worker=self)
        name = name if name.isidentifier() else "object"
        for bases in ((*own, *raised), (RemoteObject, *raised[:1]), (RemoteObject,)):
            try:
                return RemoteType(name, bases, dict(scope))
            except TypeError:  # no order of the bases fits
                continue
        raise ProtocolError("A message describes a class that can't be made.")


def _to_plain_error(error: BaseException) -> Any:
    """An exception that the worker can be told of."""
    if isinstance(error, RemoteObject):
        return error
    kind = next((kind for kind in type(error).__mro__ if EXCEPTIONS.get(kind.__name__) is kind), RuntimeError)
    plain = [arg if type(arg) in (str, int, float, bytes, bool, type(None)) else repr(arg) for arg in error.args]
    return make_exception(kind.__name__, plain)


def _are_strings(values: Any) -> bool:
    return type(values) is list and all(type(value) is str for value in values)


def _lent_kind(value: Any) -> int | None:
    if type(value) in _FILE_TYPES:
        return FILE
    if isinstance(value, Iterator):
        return ITERATE
    return CALL if callable(value) else None


def _make_remote(kind: Any, handle: int) -> Any:
    made = kind.__new__(kind) if issubclass(kind, BaseException) else object.__new__(kind)
    object.__setattr__(made, "_polar_handle", handle)
    return made


def _raise(error: Any, traceback: Any) -> NoReturn:
    if not isinstance(error, BaseException) or type(traceback) is not str:
        raise ProtocolError("A message raises something that is no exception.")
    raise error from RemoteTraceback("\n" + traceback[-MAX_TRACEBACK_CHARS:])


def _copy_back(args: Sequence[Any], named: dict[str, Any], changed: Any) -> None:
    """Arguments that the call has changed."""
    if type(changed) is not list:
        raise ProtocolError("A message changes arguments in an unknown way.")
    places: dict[Any, Any] = {**dict(enumerate(args)), **named}
    for change in changed:
        if type(change) is not tuple or len(change) != 2 or type(change[0]) not in (int, str):
            raise ProtocolError("A message changes arguments in an unknown way.")
        given: Any = places.get(change[0])
        value = change[1]
        if type(given) is not type(value) or type(given) not in (list, dict, set, bytearray):
            raise ProtocolError("A message changes an argument that can't be changed.")
        if type(given) is list or type(given) is bytearray:
            given[:] = value
        else:
            given.clear()
            given.update(value)


class RemoteFinder:
    """Decides for each import of the test process which modules are the code under test: those that stand in the
    workspace and are no tests. A name that is also installed elsewhere is imported from there: otherwise a file in the
    workspace could take the place of a module that tests trust."""

    def __init__(self, worker: Worker, workdir: str, is_test: Callable[[str], bool]) -> None:
        self._worker = worker
        self._workdir = workdir
        self._is_test = is_test

    def _is_temporary(self, path: str) -> bool:
        """Where the worker can write."""
        return _is_inside(path, self._worker.temporary)

    def install(self) -> None:
        """In front of all others, also of pytest's, which comes later."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is None and (spec := self._find_outside_workspace(name)) is not None:
            return spec
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or all(map(self._is_trusted, _list_locations(spec))):
            return spec
        remote = importlib.machinery.ModuleSpec(name, self, origin=spec.origin, is_package=True)  # type: ignore[arg-type]
        remote.submodule_search_locations = list(spec.submodule_search_locations or [])
        return remote

    def _find_outside_workspace(self, name: str) -> Any:
        if name in sys.builtin_module_names:
            return importlib.machinery.BuiltinImporter.find_spec(name)
        entries = [entry for entry in sys.path if entry and not self._is_in_workspace(entry)]
        spec = importlib.machinery.PathFinder.find_spec(name, entries)
        if spec is None or spec.origin is None or self._is_in_workspace(spec.origin):
            return None
        return spec

    def _is_in_workspace(self, path: str) -> bool:
        return _is_inside(path, self._workdir) or self._is_temporary(path)

    def _is_trusted(self, path: str) -> bool:
        if not self._is_in_workspace(path):
            return True
        return not self._is_temporary(path) and all(
            self._is_test(form(path)) for form in (os.path.abspath, os.path.realpath)
        )

    def create_module(self, spec: Any) -> RemoteModule:
        module = RemoteModule(spec.name)
        module._polar_worker = self._worker
        return module

    def exec_module(self, module: RemoteModule) -> None:
        remote, names = self._worker.import_module(module.__name__)
        module._polar_remote = remote
        module.__all__ = names
        module.__file__ = None if module.__spec__ is None else module.__spec__.origin


def _list_locations(spec: Any) -> list[str]:
    if spec.origin in (None, "built-in", "frozen", "namespace"):
        return [os.path.join(folder, "__init__.py") for folder in spec.submodule_search_locations or []]
    return [spec.origin]


def _is_inside(path: str, folder: str) -> bool:
    """By its name, or by where links lead."""
    forms = (os.path.abspath, os.path.realpath)
    return any((form(path) + "/").startswith(form(folder).rstrip("/") + "/") for form in forms)
