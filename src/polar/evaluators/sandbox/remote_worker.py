"""The process that runs the code under test where tests and code are kept apart (remote_modules.py).

It is started by the test process with one descriptor, a socket, on which it is asked to import, read, call and so on.
Once it has imported anything, it must be taken for the code under test itself: nothing here defends the test process.

This file is uploaded into the runtime beside reporter.py. It needs only the standard library and Python 3.8.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import os
import socket
import sys
import threading
import traceback
import types
import warnings
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = "polar_inside"
_CHUNK_CHARS = 1 << 16


def _load(name: str) -> Any:
    """A file beside this one, under a name that nothing else has."""
    if _PACKAGE not in sys.modules:
        sys.modules[_PACKAGE] = types.ModuleType(_PACKAGE)
        sys.modules[_PACKAGE].__path__ = [_HERE]
    return importlib.import_module(f"{_PACKAGE}.{name}")


codec = _load("remote_codec")
remote = _load("remote_modules")


class Server:
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.thread = threading.get_ident()
        self._objects: dict[int, list[Any]] = {}  # the object and how often it was referred to, by handle
        self._handles: dict[int, int] = {}  # by id
        self._classes: list[type] = []
        self._class_numbers: dict[type, int] = {}
        self._next_handle = 1
        self.output: dict[str, list[str]] = {"stdout": [], "stderr": []}

    def serve(self) -> None:
        while True:
            try:
                message = self._receive()
            except EOFError:
                return
            self._handle_request(message)

    def _receive(self) -> Any:
        return codec.decode(self._connection.receive(), self._resolve)

    def send(self, *message: Any) -> None:
        for stream, texts in self.output.items():
            if texts:
                text = "".join(texts)
                texts.clear()
                for start in range(0, len(text), _CHUNK_CHARS):
                    self._connection.send(
                        codec.encode(("output", stream, text[start : start + _CHUNK_CHARS]), self._refer)
                    )
        self._connection.send(codec.encode(message, self._refer))

    def _handle_request(self, message: Any) -> None:
        _, operation, operands, released, context = message
        for handle in released:
            self._release(handle)
        try:
            if context is not None:
                _apply_context(*context)
            before = _snapshot(operands) if operation == "call" else []
            value = getattr(self, f"_do_{operation}")(*operands)
            changed = _find_changes(before, operands) if before else []
            self.send("value", value, changed)
        except BaseException as error:  # noqa: BLE001  it is raised in the test
            text = traceback.format_exc()[-remote.MAX_TRACEBACK_CHARS :]
            if not isinstance(error, (Exception, SystemExit)):
                error = RuntimeError(f"{type(error).__name__}: {error}")
            try:
                self.send("error", error, text)
            except codec.NotPlainError:
                self.send("error", RuntimeError(f"{type(error).__name__}: {error}"), text)

    # Operations

    def _do_import(self, name: str, path: list[str]) -> Any:
        sys.path[:] = path
        module = importlib.import_module(name)
        names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        return module, [str(name) for name in names]

    def _do_get(self, holder: Any, name: str) -> Any:
        return getattr(holder, name)

    def _do_set(self, holder: Any, name: str, value: Any) -> None:
        setattr(holder, name, value)

    def _do_delete(self, holder: Any, name: str) -> None:
        delattr(holder, name)

    def _do_call(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return function(*args, **named)

    def _do_operate(self, operand: Any, operator: str, args: tuple[Any, ...]) -> Any:
        return getattr(type(operand), operator)(operand, *args)

    def _do_await(self, awaitable: Any) -> Any:
        async def wait() -> Any:
            return await awaitable

        return asyncio.run(wait())

    def _do_names(self, holder: Any, own: bool) -> list[str]:
        return [str(name) for name in (list(vars(holder)) if own else dir(holder))]

    def _do_describe(self, number: int) -> Any:
        kind = self._classes[number]
        bases = [self._describe_base(base) for base in kind.__bases__ if base not in (object, BaseException)]
        operators = [name for name in remote.OPERATORS if getattr(kind, name, None) is not None]
        if issubclass(kind, type):  # classes of a metaclass are objects here
            operators = [name for name in operators if name != "__call__"] + ["__call__"]
        return kind.__name__, str(kind.__module__), bases, operators

    def _describe_base(self, base: type) -> Any:
        if codec.EXCEPTIONS.get(base.__name__) is base:
            return base.__name__
        return self._get_class_number(base)

    # References

    def _get_class_number(self, kind: type) -> int:
        if kind not in self._class_numbers:
            self._class_numbers[kind] = len(self._classes)
            self._classes.append(kind)
        return self._class_numbers[kind]

    def _refer(self, value: Any) -> tuple[bytes, int, int]:
        if type(value) in (Lent, LentIterator, LentFile):
            return b"k", value.number, 0
        if isinstance(value, type):
            return b"c", self._get_class_number(value), 0
        handle = self._handles.get(id(value))
        if handle is None:
            handle = self._handles[id(value)] = self._next_handle
            self._objects[handle] = [value, 0]
            self._next_handle += 1
        self._objects[handle][1] += 1
        return b"o", handle, self._get_class_number(type(value))

    def _release(self, handle: int) -> None:
        entry = self._objects[handle]
        entry[1] -= 1
        if entry[1] <= 0:
            del self._objects[handle]
            del self._handles[id(entry[0])]

    def _resolve(self, tag: bytes, first: int, second: int) -> Any:
        if tag == b"h":
            return self._objects[first][0]
        if tag == b"c":
            return self._classes[first]
        return (Lent, LentIterator, LentFile)[second](self, first)

    def use_lent(self, number: int, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if threading.get_ident() != self.thread:
            raise RuntimeError("What a test handed over can only be used in the thread that the test called.")
        self.send("lent", number, method, args, named)
        while True:
            message = self._receive()
            if message[0] == "value":
                return message[1]
            if message[0] == "error":
                raise message[1]
            self._handle_request(message)


class Lent:
    """A function of the tests'."""

    def __init__(self, server: Server, number: int) -> None:
        self.server = server
        self.number = number

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.server.use_lent(self.number, "__call__", args, named)


class LentIterator:
    def __init__(self, server: Server, number: int) -> None:
        self.server = server
        self.number = number

    def __iter__(self) -> LentIterator:
        return self

    def __next__(self) -> Any:
        return self.server.use_lent(self.number, "__next__", (), {})


class LentFile:
    def __init__(self, server: Server, number: int) -> None:
        self.server = server
        self.number = number

    def __getattr__(self, name: str) -> Any:
        if name not in remote.FILE_METHODS:
            raise AttributeError(name)
        return lambda *args: self.server.use_lent(self.number, name, args, {})

    def __iter__(self) -> LentFile:
        return self

    def __next__(self) -> Any:
        line = self.server.use_lent(self.number, "readline", (), {})
        if not line:
            raise StopIteration
        return line

    def __enter__(self) -> LentFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.use_lent(self.number, "close", (), {})


class Output(io.TextIOBase):
    """What the code under test prints, for the tests to capture."""

    def __init__(self, server: Server, stream: str) -> None:
        self._texts = server.output[stream]

    def write(self, text: str) -> int:
        self._texts.append(str(text))
        return len(text)

    def writable(self) -> bool:
        return True

    encoding = "utf-8"


def _apply_context(folder: str, changed: dict[str, str], gone: list[str]) -> None:
    os.chdir(folder)
    os.environ.update(changed)
    for name in gone:
        os.environ.pop(name, None)


def _list_mutable(operands: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    _, args, named = operands
    places = [*enumerate(args), *named.items()]
    return [(place, value) for place, value in places if type(value) in (list, dict, set, bytearray)]


def _snapshot(operands: tuple[Any, ...]) -> list[tuple[Any, bytes]]:
    return [(place, _fingerprint(value)) for place, value in _list_mutable(operands)]


def _find_changes(before: list[tuple[Any, bytes]], operands: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    now = dict(_list_mutable(operands))
    return [(place, now[place]) for place, known in before if _fingerprint(now[place]) != known]


def _fingerprint(value: Any) -> bytes:
    return codec.encode(value, lambda thing: (b"o", id(thing), 0))  # type: ignore[no-any-return]


def main() -> None:
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    connection = codec.Connection(end)
    confinement = _load("confinement")
    confinement.confine_worker()
    confinement.hide(codec.decode(connection.receive(), codec.reject_references))
    sys.dont_write_bytecode = True
    server = Server(connection)
    sys.stdout = Output(server, "stdout")
    sys.stderr = Output(server, "stderr")
    sys.argv[:] = [""]
    sys.modules["__main__"] = types.ModuleType("__main__")
    warnings.simplefilter("always")

    def show(message: Any, category: type[Warning], *_: object) -> None:
        if threading.get_ident() != server.thread:
            return
        named = next(kind.__name__ for kind in category.__mro__ if codec.EXCEPTIONS.get(kind.__name__) is kind)
        server.send("warning", named, str(message))

    warnings.showwarning = show  # type: ignore[assignment]
    server.serve()


if __name__ == "__main__":
    main()
