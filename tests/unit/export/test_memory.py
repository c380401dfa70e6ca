"""Thousands of sessions go through an exporter; memory does not grow with them."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from polar.export.atif import Atif
from polar.export.base import Exporter, Item
from polar.export.parquet import Parquet
from polar.export.polar import Polar
from polar.export.sft import Sft
from polar.export.skyrl import SkyRl
from polar.export.slime import Slime
from polar.export.tree import Tree
from tests.unit.export.samples import Talk, said

MEGABYTE = 1024 * 1024


def sessions(count: int) -> Iterator[Item]:
    """Each is new, and of some 2 KB."""
    for index in range(count):
        talk = Talk(f"s{index}")
        talk.call([{"role": "user", "content": "word " * 40}], said("Yes."))
        yield talk.item(task_id=f"t{index // 4}")


def peak(make: Callable[[], Exporter], count: int) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        exporter = make()
        written = sum(len(exporter.feed(item)) for item in sessions(count)) + len(exporter.finish())
        assert written > 10 * count
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


OTHERS = [pytest.param(make, marks=pytest.mark.slow) for make in (Polar, Slime, SkyRl, Sft, Atif, Tree)]


@pytest.mark.parametrize("make", [Parquet, *OTHERS], ids=lambda make: make.name)
def test_memory_is_that_of_one_session(make: Callable[[], Exporter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.export.parquet._ROW_GROUP", MEGABYTE // 4)
    peak(make, 20)  # what is loaded once
    few, many = peak(make, 200), peak(make, 2000)
    assert many - few < MEGABYTE  # of some 5
    assert pa.total_allocated_bytes() < 16 * MEGABYTE
