"""What crosses between tests and the code under test (remote_modules.py): messages of plain data and references.

A message may be forged. Decoding builds plain data by exact types and asks `resolve` for references; it has bounds for
sizes and depth, and raises ProtocolError for anything that `encode` does not make.

This file is uploaded into the runtime beside reporter.py. It needs only the standard library and Python 3.8.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import fractions
import pathlib
import socket
import struct
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

MAX_FRAME_BYTES = 64 << 20
MAX_DEPTH = 100
MAX_INT_BYTES = 1 << 16

if TYPE_CHECKING:
    Refer = Callable[[Any], tuple[bytes, int, int]]
    Resolve = Callable[[bytes, int, int], Any]


class NotPlainError(TypeError):
    """A value can't be handed to the other process."""


class ProtocolError(Exception):
    """The other process sent what no honest one sends."""


def _plain_exceptions() -> dict[str, type[BaseException]]:
    found = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
    return {name: value for name, value in found.items() if issubclass(value, (Exception, SystemExit))}


EXCEPTIONS = _plain_exceptions()
BUILTIN_TYPES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}

_SEQUENCES: dict[type, bytes] = {list: b"l", tuple: b"t", set: b"S", frozenset: b"Z"}
_SEQUENCE_TAGS = {tag: kind for kind, tag in _SEQUENCES.items()}
_SINGLETONS: dict[bytes, Any] = {b"N": None, b"T": True, b"F": False, b"E": Ellipsis, b"U": NotImplemented}
_REFERENCES = (b"o", b"c", b"h", b"k")  # an object or class of the worker's; a handle for it; something of the tests'


def _timezone_parts(value: datetime.datetime | datetime.time) -> Any:
    if value.tzinfo is None:
        return None
    if type(value.tzinfo) is not datetime.timezone:
        raise NotPlainError(f"A time with a {type(value.tzinfo).__name__} can't be copied; use datetime.timezone.")
    offset = value.tzinfo.utcoffset(None)
    return offset.days * 86400 + offset.seconds


def _timezone(offset: Any) -> Any:
    return None if offset is None else datetime.timezone(datetime.timedelta(seconds=offset))


def _make_time(hour: int, minute: int, second: int, micro: int, zone: Any, fold: int) -> datetime.time:
    return datetime.time(hour, minute, second, micro, _timezone(zone), fold=fold)


def _make_datetime(y: int, m: int, d: int, h: int, minute: int, s: int, micro: int, zone: Any, fold: int) -> Any:
    return datetime.datetime(y, m, d, h, minute, s, micro, _timezone(zone), fold=fold)


_VALUE_TYPES: dict[str, tuple[type, Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    "date": (datetime.date, lambda value: (value.year, value.month, value.day), datetime.date),
    "time": (
        datetime.time,
        lambda value: (value.hour, value.minute, value.second, value.microsecond, _timezone_parts(value), value.fold),
        _make_time,
    ),
    "datetime": (
        datetime.datetime,
        lambda value: (*value.timetuple()[:6], value.microsecond, _timezone_parts(value), value.fold),
        _make_datetime,
    ),
    "timedelta": (
        datetime.timedelta,
        lambda value: (value.days, value.seconds, value.microseconds),
        datetime.timedelta,
    ),
    "Decimal": (decimal.Decimal, lambda value: tuple(value.as_tuple()), lambda *parts: decimal.Decimal(parts)),
    "Fraction": (fractions.Fraction, lambda value: (value.numerator, value.denominator), fractions.Fraction),
    "Path": (type(pathlib.Path()), lambda value: (str(value),), pathlib.Path),
    "PurePosixPath": (pathlib.PurePosixPath, lambda value: (str(value),), pathlib.PurePosixPath),
    "UUID": (uuid.UUID, lambda value: (value.int,), lambda number: uuid.UUID(int=number)),
    "range": (range, lambda value: (value.start, value.stop, value.step), range),
    "slice": (slice, lambda value: (value.start, value.stop, value.step), slice),
}
_VALUE_NAMES = {kind: name for name, (kind, _, _) in _VALUE_TYPES.items()}


def encode(value: Any, refer: Refer) -> bytes:
    """Raises NotPlainError where something in it is no plain data and `refer` has no reference for it."""
    out = bytearray()
    try:
        _put(out, value, refer, 0)
    except RecursionError:
        raise NotPlainError("The value is nested too deeply to be copied.") from None
    return bytes(out)


def _put(out: bytearray, value: Any, refer: Refer, depth: int) -> None:
    kind = type(value)
    if depth > MAX_DEPTH:
        raise NotPlainError(f"Values nested deeper than {MAX_DEPTH} can't be copied.")
    if kind in (type(None), bool, type(Ellipsis), type(NotImplemented)):
        out += next(tag for tag, single in _SINGLETONS.items() if single is value)
    elif kind is int:
        _put_bytes(out, b"i", value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True), MAX_INT_BYTES)
    elif kind is float:
        out += b"f" + struct.pack(">d", value)
    elif kind is complex:
        out += b"j" + struct.pack(">dd", value.real, value.imag)
    elif kind is str:
        _put_bytes(out, b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _put_bytes(out, b"b", value)
    elif kind is bytearray:
        _put_bytes(out, b"a", bytes(value))
    elif kind in _SEQUENCES:
        _put_items(out, _SEQUENCES[kind], list(value), refer, depth)
    elif kind is dict:
        _put_items(out, b"d", [part for item in list(value.items()) for part in item], refer, depth)
    elif kind in _VALUE_NAMES:
        name = _VALUE_NAMES[kind]
        _put_items(out, b"v", [name, *_VALUE_TYPES[name][1](value)], refer, depth)
    elif kind is type and _is_builtin(value):
        _put_bytes(out, b"g", value.__name__.encode())
    elif _is_plain_exception(kind):
        _put_items(out, b"x", [kind.__name__, *value.args], refer, depth)
    else:
        tag, first, second = refer(value)
        out += tag + struct.pack(">QQ", first, second)
    if len(out) > MAX_FRAME_BYTES:
        raise NotPlainError(f"Values of more than {MAX_FRAME_BYTES >> 20} MiB can't be copied.")


def _is_builtin(kind: Any) -> bool:
    return BUILTIN_TYPES.get(kind.__name__) is kind


def _is_plain_exception(kind: Any) -> bool:
    return EXCEPTIONS.get(kind.__name__) is kind


def _put_bytes(out: bytearray, tag: bytes, data: bytes, max_bytes: int = MAX_FRAME_BYTES) -> None:
    if len(data) > max_bytes:
        raise NotPlainError(f"A value of {len(data)} bytes can't be copied; {max_bytes} is the most.")
    out += tag + struct.pack(">I", len(data)) + data


def _put_items(out: bytearray, tag: bytes, items: list[Any], refer: Refer, depth: int) -> None:
    out += tag + struct.pack(">I", len(items))
    for item in items:
        _put(out, item, refer, depth + 1)


def decode(data: bytes, resolve: Resolve) -> Any:
    """Raises ProtocolError where `data` is not what `encode` makes."""
    reader = _Reader(data, resolve)
    try:
        value = reader.read(0)
    except (ArithmeticError, LookupError, RecursionError, TypeError, UnicodeError, ValueError, struct.error) as error:
        raise ProtocolError(f"A message can't be decoded: {error}") from error
    if reader.position != len(data):
        raise ProtocolError("A message is longer than what it holds.")
    return value


def reject_references(*_: Any) -> NoReturn:
    """For messages that hold no references."""
    raise ProtocolError("A message refers to something.")


class _Reader:
    def __init__(self, data: bytes, resolve: Resolve) -> None:
        self._data = data
        self._resolve = resolve
        self.position = 0

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise ProtocolError("A message ends too early.")
        taken, self.position = self._data[self.position : end], end
        return taken

    def _take_counted(self, max_bytes: int) -> bytes:
        count = struct.unpack(">I", self._take(4))[0]
        if count > max_bytes:
            raise ProtocolError(f"A message has a value of {count} bytes.")
        return self._take(count)

    def read(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ProtocolError("A message is nested too deeply.")
        tag = self._take(1)
        if tag in _SINGLETONS:
            return _SINGLETONS[tag]
        if tag == b"i":
            return int.from_bytes(self._take_counted(MAX_INT_BYTES), "big", signed=True)
        if tag == b"f":
            return struct.unpack(">d", self._take(8))[0]
        if tag == b"j":
            return complex(*struct.unpack(">dd", self._take(16)))
        if tag == b"s":
            return self._take_counted(MAX_FRAME_BYTES).decode("utf-8", "surrogatepass")
        if tag == b"b":
            return self._take_counted(MAX_FRAME_BYTES)
        if tag == b"a":
            return bytearray(self._take_counted(MAX_FRAME_BYTES))
        if tag == b"g":
            return BUILTIN_TYPES[self._take_counted(100).decode()]
        if tag in _REFERENCES:
            return self._resolve(tag, *struct.unpack(">QQ", self._take(16)))
        return self._read_items(tag, depth)

    def _read_items(self, tag: bytes, depth: int) -> Any:
        count = struct.unpack(">I", self._take(4))[0]
        if count > len(self._data) - self.position:  # each takes a byte at least
            raise ProtocolError(f"A message claims {count} items.")
        items = [self.read(depth + 1) for _ in range(count)]
        if tag in _SEQUENCE_TAGS:
            kind = _SEQUENCE_TAGS[tag]
            return items if kind is list else kind(items)
        if tag == b"d":
            if count % 2:
                raise ProtocolError("A message has a dict with a key that has no value.")
            return {items[at]: items[at + 1] for at in range(0, count, 2)}
        if tag == b"v":
            return _VALUE_TYPES[items[0]][2](*items[1:])
        if tag == b"x":
            return make_exception(items[0], items[1:])
        raise ProtocolError(f"A message has the unknown tag {tag!r}.")


def make_exception(name: str, args: list[Any]) -> BaseException:
    try:
        return EXCEPTIONS[name](*args)
    except TypeError:  # one that takes other arguments than it keeps
        return RuntimeError(name, *args)


class Connection:
    """Messages over a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, data: bytes) -> None:
        self._socket.sendall(struct.pack(">I", len(data)) + data)

    def receive(self) -> bytes:
        """Raises EOFError where the other process is gone."""
        length = struct.unpack(">I", self._receive(4))[0]
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"A message claims {length} bytes.")
        return self._receive(length)

    def _receive(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            part = self._socket.recv(min(count - len(received), 1 << 20))
            if not part:
                raise EOFError("The other process closed the connection.")
            received += part
        return bytes(received)

    def close(self) -> None:
        self._socket.close()
