"""Thousands of sessions go through an exporter; memory does not grow with them."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from polar.export.atif import AtifExporter
from polar.export.base import Exporter, SessionItem
from polar.export.parquet import ParquetExporter
from polar.export.polar import PolarExporter
from polar.export.sft import SftExporter
from polar.export.skyrl import SkyRlExporter
from polar.export.slime import SlimeExporter
from polar.export.tree import TreeExporter
from polar.testing.conversations import ConversationBuilder, make_text_parts

MEGABYTE = 1024 * 1024


def sessions(count: int) -> Iterator[SessionItem]:
    """Each is new, and of some 2 KB."""
    for index in range(count):
        talk = ConversationBuilder(f"s{index}")
        talk.add_call([{"role": "user", "content": "word " * 40}], make_text_parts("Yes."))
        yield talk.build_item(task_id=f"t{index // 4}")


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


OTHERS = [
    pytest.param(make, marks=pytest.mark.slow)
    for make in (PolarExporter, SlimeExporter, SkyRlExporter, SftExporter, AtifExporter, TreeExporter)
]


@pytest.mark.parametrize("make", [ParquetExporter, *OTHERS], ids=lambda make: make.name)
def test_memory_is_that_of_one_session(make: Callable[[], Exporter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.export.parquet._ROW_GROUP_BYTES", MEGABYTE // 4)
    peak(make, 20)  # what is loaded once
    few, many = peak(make, 200), peak(make, 2000)
    assert many - few < MEGABYTE  # of some 5
    assert pa.total_allocated_bytes() < 16 * MEGABYTE
