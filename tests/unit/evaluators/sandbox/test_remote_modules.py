"""Remote modules: what crosses between tests and the code under test, and what a hostile worker can't do."""

import contextlib
import datetime
import decimal
import fractions
import io
import itertools
import math
import operator
import struct
import sys
import unittest
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.evaluators.sandbox import remote_codec, remote_worker, reporter
from polar.evaluators.sandbox.remote_codec import MAX_DEPTH, MAX_INT_BYTES, NotPlainError, ProtocolError, decode, encode
from polar.evaluators.sandbox.remote_modules import RemoteFinder, RemoteObject, Worker, WorkerDiedError

SCRIPT = remote_worker.__file__

# Codec


def refuse(*_: Any) -> Any:
    raise NotPlainError("not plain")


def copy(value: Any) -> Any:
    return decode(encode(value, refuse), refuse)


TEXT = st.text(st.characters(exclude_categories=()))  # surrogates, too
TIMEZONES = st.integers(-1439, 1439).map(lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes)))
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**600), 10**600),
    st.floats(),
    st.complex_numbers(),
    TEXT,
    st.binary(),
    st.dates(),
    st.timedeltas(),
    st.datetimes(timezones=st.one_of(st.none(), TIMEZONES)),
    st.times(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.just(Path("a/b")),
    st.just(PurePosixPath("/c")),
    st.just(range(1, 9, 2)),
    st.sampled_from([int, str, ValueError, Ellipsis, NotImplemented]),
)
PLAIN = st.recursive(
    st.one_of(HASHABLE, st.decimals(), st.binary().map(bytearray), st.just(slice(1, None, 2))),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(HASHABLE, inner),
        st.sets(HASHABLE),
        st.frozensets(HASHABLE),
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    """Equal with equal types all the way down; NaN is NaN, and -0.0 is not 0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, decimal.Decimal):
        return left.as_tuple() == right.as_tuple()
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, set | frozenset):
        return sorted(map(repr, left)) == sorted(map(repr, right))
    return bool(left == right)


@given(PLAIN)
def test_plain_data_is_copied_exactly(value: Any) -> None:
    assert same(copy(value), value)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_are_plain_data(data: bytes) -> None:
    try:
        value = decode(data, refuse)
    except (ProtocolError, NotPlainError):
        return
    encode(value, refuse)


@given(PLAIN, st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_messages_raise_nothing_else(value: Any, place: int, byte: int) -> None:
    data = bytearray(encode(value, refuse))
    data[place % len(data)] = byte
    with contextlib.suppress(ProtocolError, NotPlainError):
        decode(bytes(data), refuse)


def test_subclasses_are_not_plain() -> None:
    class Number(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    for value in (Number(5), type("Text", (str,), {})("x"), type("Items", (list,), {})(), type("Pair", (tuple,), {})()):
        with pytest.raises(NotPlainError):
            copy(value)


def test_bounds_of_what_is_encoded() -> None:
    nested: Any = []
    for _ in range(MAX_DEPTH + 1):
        nested = [nested]
    circular: list[Any] = []
    circular.append(circular)
    for value in (nested, circular, 1 << (8 * MAX_INT_BYTES + 8), bytes(remote_codec.MAX_FRAME_BYTES + 1)):
        with pytest.raises(NotPlainError):
            copy(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"?",
        b"l\xff\xff\xff\xff",  # four billion items
        b"s\xff\xff\xff\xff",
        b"i" + struct.pack(">I", MAX_INT_BYTES + 1) + bytes(MAX_INT_BYTES + 1),
        b"l\x00\x00\x00\x01" * 5000 + b"N",
        b"S\x00\x00\x00\x01l\x00\x00\x00\x00",  # a set of a list
        b"d\x00\x00\x00\x01N",  # a key without a value
        b"g\x00\x00\x00\x04eval",
        b"x\x00\x00\x00\x01" + b"s\x00\x00\x00\x11KeyboardInterrupt",
        b"v\x00\x00\x00\x01" + b"s\x00\x00\x00\x05Popen",
        b"v\x00\x00\x00\x02" + b"s\x00\x00\x00\x04date" + b"N",
        b"NN",
    ],
)
def test_forged_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, refuse)


# Modules

CALC = '''
"""Calculates."""
import enum, os, warnings

class Error(ValueError):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code

class Point:
    """A point."""
    def __init__(self, x, y): self.x, self.y = x, y
    def __repr__(self): return f"Point({self.x}, {self.y})"
    def __eq__(self, other): return isinstance(other, Point) and self.x == other.x
    __hash__ = None
    def __mul__(self, n): return Point(self.x * n, self.y * n)
    def __len__(self): return 2
    def __iter__(self): return iter((self.x, self.y))
    def __getitem__(self, key): return (self.x, self.y)[key]

class Near(Point): pass
class Color(enum.Enum):
    RED = 1

class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    __hash__ = int.__hash__
    __class__ = int

class Swallow:
    def __enter__(self): return self
    def __exit__(self, *error): return True

class Array:
    __array_interface__ = {"shape": (1,), "typestr": "<i8", "data": (1, False), "version": 3}

class Abort(BaseException): pass
def raise_error(error): raise error()

def add(a, b): return a + b
def equal(): return Equal(0)
def fail(code): raise Error(code)
def look_up(): return {}["x"]
def sort(items): items.sort()
def visit(do, items):
    try: return [do(item) for item in items]
    except AssertionError: return []
def read(file): return file.read()
def total(numbers): return sum(numbers)
def count():
    number = 0
    while True:
        number += 1
        yield number
async def later(): return 5
def shout():
    print("hello")
    warnings.warn("old", DeprecationWarning)
def folder(): return os.getcwd()
def variable(name): return os.environ.get(name)
def give(value): return value
def deep():
    value = []
    for _ in range(10_000): value = [value]
    return value
def large(): return bytes(1 << 30)
def die(): os._exit(0)
'''


class Reports:
    def __init__(self) -> None:
        self.proven: list[bool] = []

    def __call__(self, why: str, proven: bool) -> None:
        self.proven.append(proven)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: Reports) -> Iterator[Callable[..., Any]]:
    """Starts a worker, and gives its module `calc`."""
    (tmp_path / "calc.py").write_text(CALC)
    monkeypatch.syspath_prepend(tmp_path)
    workers = []

    def start(script: str = SCRIPT, **options: Any) -> Any:
        worker = Worker(script, reports, temporary=str(tmp_path), **options)
        workers.append(worker)
        return worker.import_module("calc")[0]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture
def calc(start: Callable[..., Any]) -> Any:
    return start()


def test_calls_give_plain_data(calc: Any) -> None:
    assert calc.add(2, 3) == 5
    assert calc.add("a", b="b") == "ab"
    assert type(calc.add(1.5, 1)) is float


def test_objects_are_used_where_they_are(calc: Any) -> None:
    point = calc.Point(1, 2)
    assert isinstance(point, calc.Point)
    assert isinstance(calc.Near(1, 2), calc.Point)
    assert not isinstance(point, calc.Near)
    assert (point.x, (point * 3).x, len(point), list(point), point[1]) == (1, 3, 2, [1, 2], 2)
    assert (repr(point), point.__doc__, vars(point)) == ("Point(1, 2)", "A point.", {"x": 1, "y": 2})
    point.x = 7
    assert point.x == 7
    assert (calc.Color.RED.value, calc.Color(1).name, [color.name for color in calc.Color]) == (1, "RED", ["RED"])
    assert list(itertools.islice(calc.count(), 3)) == [1, 2, 3]
    assert calc.give(point).x == 7
    assert calc.give(calc.Point) is calc.Point


def test_errors_are_raised_as_what_they_are(calc: Any) -> None:
    with pytest.raises(calc.Error, match="code 3") as error:
        calc.fail(3)
    assert (error.value.code, error.value.args) == (3, ("code 3",))
    with pytest.raises(ValueError):
        calc.fail(3)
    with pytest.raises(KeyError) as missing:
        calc.look_up()
    assert missing.value.args == ("x",)


def test_a_worker_raises_only_what_tests_can_catch(calc: Any, reports: Reports) -> None:
    for error in (KeyboardInterrupt, GeneratorExit, calc.Abort):
        with pytest.raises(RuntimeError):
            calc.raise_error(error)
    with pytest.raises(SystemExit):
        calc.raise_error(SystemExit)
    assert reports.proven == []


def test_warnings_that_are_errors_are_raised_by_the_call(calc: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning):
            calc.shout()
    assert calc.add(1, 1) == 2


def test_what_tests_hand_over(calc: Any) -> None:
    numbers = [3, 1, 2]
    calc.sort(numbers)
    assert numbers == [1, 2, 3]
    assert calc.visit(lambda number: calc.add(number, 1), [1, 2]) == [2, 3]
    assert calc.read(io.StringIO("text")) == "text"
    assert calc.total(number for number in (1, 2)) == 3
    with pytest.raises(TypeError, match="can't be handed"):
        calc.give(object())


def test_attributes_can_be_replaced_and_put_back(calc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.object(calc, "add", return_value=9) as add:
        assert calc.add(1, 1) == 9
    add.assert_called_once_with(1, 1)
    assert calc.add(1, 1) == 2
    with monkeypatch.context() as patch:
        patch.setattr(calc, "Error", RuntimeError)
        with pytest.raises(RuntimeError):
            calc.fail(1)
    with pytest.raises(calc.Error):
        calc.fail(1)


def test_surroundings_of_a_test(
    calc: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODE", "fast")
    assert (calc.folder(), calc.variable("MODE")) == (str(tmp_path), "fast")
    with pytest.warns(DeprecationWarning, match="old"):
        calc.shout()
    assert capsys.readouterr().out == "hello\n"


async def test_coroutines_are_awaited(calc: Any) -> None:
    assert await calc.later() == 5


def test_what_is_equal_to_everything_is_equal_to_nothing(calc: Any) -> None:
    equal = calc.equal()
    assert isinstance(equal, RemoteObject)
    assert not isinstance(equal, int)
    assert equal not in [5, "5", None]
    assert (equal == 5, equal != 5, operator.eq(5, equal)) == (False, True, False)
    assert equal != pytest.approx(5)
    case = unittest.TestCase()
    for name, first, second in (
        ("assertEqual", equal, 5),
        ("assertAlmostEqual", equal, 5),
        ("assertAlmostEqual", 5, equal),
        ("assertLess", equal, 5),
        ("assertGreater", 5, equal),
        ("assertIn", 5, equal),
        ("assertEqual", [equal], [calc.equal()]),
    ):
        with pytest.raises((AssertionError, TypeError)):
            getattr(case, name)(first, second)


def test_objects_are_compared_by_their_own_code_only_where_that_is_asked_for(start: Callable[..., Any]) -> None:
    strict, trusting = start(), start(trust_equality=True)
    with pytest.raises(TypeError, match="Compare plain data"):
        assert strict.Point(1, 2) == strict.Point(1, 2)
    assert trusting.Point(1, 2) == trusting.Point(1, 2)
    assert trusting.Point(1, 2) != trusting.Point(2, 2)
    assert trusting.Point(1, 2) != (1, 2)


def test_a_failing_test_can_not_be_swallowed(calc: Any) -> None:
    def check(value: int) -> None:
        assert value == 5

    with pytest.raises(AssertionError):
        calc.visit(check, [4])
    with pytest.raises(AssertionError), calc.Swallow():
        raise AssertionError
    with calc.Swallow():
        raise ValueError


def test_no_protocol_of_other_libraries_is_answered(calc: Any) -> None:
    assert not hasattr(calc.Array(), "__array_interface__")
    assert not hasattr(calc.Array, "__array_interface__")


def test_values_that_are_too_large_are_errors(calc: Any) -> None:
    for function in (calc.deep, calc.large):
        with pytest.raises(TypeError, match="can't be copied"):
            function()
    assert calc.add(1, 1) == 2


def test_a_worker_that_ends_takes_its_modules_with_it(calc: Any, reports: Reports) -> None:
    for call in (calc.die, lambda: calc.add(1, 1)):
        with pytest.raises(WorkerDiedError):
            call()
    assert reports.proven == [False]


EVIL = """
import socket, struct, sys
sys.path.insert(0, {folder!r})
from remote_codec import encode
end = socket.socket(fileno=int(sys.argv[1]))
def refer(value): raise SystemExit
def receive():
    data = b""
    size = struct.unpack(">I", end.recv(4, socket.MSG_WAITALL))[0]
    return end.recv(size, socket.MSG_WAITALL)
def send(data): end.sendall(struct.pack(">I", len(data)) + data)
receive()
receive()
{body}
receive()
"""
BODIES = {
    "no reply": "send(encode(5, refer))",
    "an unknown kind": "send(encode(('exec', 'import os'), refer))",
    "an endless frame": "end.sendall(b'\\xff\\xff\\xff\\xff')",
    "not even a message": "send(b'\\x80\\x04cposix\\nsystem\\n')",
    "not a module": "send(encode(('value', (5, []), []), refer))",
    "names that are no texts": "send(b't' + struct.pack('>I', 3) + encode('value', refer) + b'NN')",
    "an error that is none": "send(encode(('error', 5, ''), refer))",
    "something that no test handed over": "send(encode(('lent', 0, '__call__', (), {}), refer))",
    "a changed argument": "send(encode(('value', (1, []), [(0, [])]), refer))",
    "a class that is none": (
        "send(b't' + struct.pack('>I', 3) + encode('value', refer) + b'o' + struct.pack('>QQ', 1, 1) + b'N')\n"
        "receive()\nsend(encode(('value', ('X', 'm', [1, 2], [3]), []), refer))"
    ),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_worker_that_forges_messages_is_given_up(
    start: Callable[..., Any], tmp_path: Path, reports: Reports, body: str
) -> None:
    script = tmp_path / "evil.py"
    script.write_text(EVIL.format(folder=str(Path(SCRIPT).parent), body=body))
    with pytest.raises(WorkerDiedError):
        start(str(script))
    assert reports.proven == [True]


def test_values_of_the_standard_library() -> None:
    values = (datetime.date(2024, 2, 29), decimal.Decimal("-0.10"), fractions.Fraction(2, 6), uuid.UUID(int=5))
    assert copy(values) == values
    assert math.isnan(copy(math.nan))
    assert math.copysign(1, copy(-0.0)) == -1


def test_which_modules_run_in_the_test_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: Reports
) -> None:
    """Tests of the workspace, and what is installed elsewhere; nothing that the worker could have written."""
    workdir, temporary, installed = (tmp_path / name for name in ("workspace", "tmp", "installed"))
    for path in ("code_a.py", "both.py", "statistics.py", "tests/help_a.py", "test_a.py", "pack/tests/help_b.py"):
        (workdir / path).parent.mkdir(parents=True, exist_ok=True)
        (workdir / path).touch()
    for folder, name in ((temporary, "test_b.py"), (installed, "both.py")):
        folder.mkdir()
        (folder / name).touch()
    (workdir / "linked.py").symlink_to("test_a.py")
    (workdir / "tests" / "out.py").symlink_to("../code_a.py")
    for folder in (installed, temporary, workdir / "pack/tests", workdir / "tests", workdir):
        monkeypatch.syspath_prepend(folder)
    worker = Worker(SCRIPT, reports, temporary=str(temporary))
    tests = reporter._TestFiles(str(workdir), [])
    finder = RemoteFinder(worker, str(workdir), tests.contains)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    remote = {
        name
        for name in ("code_a", "both", "statistics", "help_a", "test_a", "help_b", "test_b", "linked", "out", "json")
        if finder.find_spec(name).loader is finder
    }
    assert remote == {"code_a", "test_b", "linked", "out"}
    assert finder.find_spec("no_such_module") is None
