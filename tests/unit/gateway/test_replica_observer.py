"""Which version sampled which token, as far as it can be known; and what freezing does to the session's clock."""

from typing import Any

from polar.engines.base import Capabilities
from polar.gateway.meter import CallTimer, Clock
from polar.gateway.replica_observer import ReplicaObserver, VersionTracker
from polar.records.exchange import VersionSpan


class Record:
    def __init__(self) -> None:
        self.sampled: list[int] = []
        self.reported_versions: list[VersionSpan] | None = None
        self.tokens_come_at_once = False


class Engine:
    capabilities = Capabilities()


class Replica:
    """As much of one as is looked at."""

    def __init__(self, version: int = 0, *, weights_lost: bool = False) -> None:
        self.version, self.weights_lost, self.frozen, self.engine = version, weights_lost, False, Engine()


def observe(replica: Any) -> tuple[ReplicaObserver, Any]:
    record: Any = Record()
    observer = ReplicaObserver(record, CallTimer(Clock()))
    observer.assign(replica)
    return observer, record


def test_one_version_from_the_first_token_to_the_last() -> None:
    observer, record = observe(Replica(3))
    assert observer.version_spans() == []
    record.sampled += [1, 2]
    assert observer.version_spans() == [VersionSpan(3, 0, 2)]


def test_a_call_that_stood_still_knows_its_boundary() -> None:
    observer, record = observe(Replica(3))
    record.sampled += [1, 2]
    observer.on_version_changed(4, frozen=True)
    record.sampled += [3]
    assert observer.version_spans() == [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)]


def test_a_call_that_ran_on_does_not() -> None:
    observer, record = observe(Replica(3))
    record.sampled += [1, 2]
    observer.on_version_changed(4, frozen=False)
    record.sampled += [3]
    assert observer.version_spans() == []


def test_a_frozen_call_without_a_token_may_have_sampled_some() -> None:
    observer, record = observe(Replica(3))
    observer.on_version_changed(4, frozen=True)
    record.sampled += [1]
    assert observer.version_spans() == []


def test_a_frozen_stream_without_a_token_has_sampled_none() -> None:
    observer, record = observe(Replica(3))
    record.tokens_come_at_once = True
    observer.on_version_changed(4, frozen=True)
    record.sampled += [1]
    assert observer.version_spans() == [VersionSpan(4, 0, 1)]


def test_nobody_knows_what_a_restarted_engine_samples_with() -> None:
    observer, record = observe(Replica(3, weights_lost=True))
    record.sampled += [1]
    assert observer.version_spans() == []


def test_another_replica_begins_anew() -> None:
    observer, record = observe(Replica(3, weights_lost=True))
    again: Any = Replica(5)
    observer.assign(again)
    record.sampled += [1]
    assert (observer.replica, observer.version_spans()) == (again, [VersionSpan(5, 0, 1)])


def test_an_engines_labels_count_unless_they_are_leftovers() -> None:
    labels = [VersionSpan(2, 0, 1), VersionSpan(3, 1, 2)]
    tracker = VersionTracker(3)
    tracker.change(3, 0, boundary_known=False)
    assert tracker.spans(2, labels) == labels
    assert tracker.spans(2, [VersionSpan(2, 0, 2)]) == []
    assert VersionTracker(3).spans(2, [VersionSpan(2, 0, 2)]) == [VersionSpan(3, 0, 2)]


def test_an_engine_that_keeps_its_labels_itself_is_believed() -> None:
    tracker = VersionTracker(3, trusts_engine=True)
    assert tracker.spans(2, None) == []
    assert tracker.spans(2, [VersionSpan(0, 0, 2)]) == [VersionSpan(0, 0, 2)]


async def test_the_clock_runs_while_a_call_is_sampled_and_not_frozen() -> None:
    clock = Clock()
    clock.start()
    timer = CallTimer(clock)
    record: Any = Record()
    observer = ReplicaObserver(record, timer)
    replica: Any = Replica()
    observer.assign(replica)
    timer.start_waiting(paused=False)
    assert clock.is_running  # a wait counts as one only after a moment
    observer.on_frozen()
    assert not clock.is_running
    observer.on_thawed()
    assert not clock.is_running  # it has not begun: it goes on waiting
    observer.mark_begun()
    assert clock.is_running
    observer.on_frozen()
    assert not clock.is_running
    observer.on_thawed()
    assert clock.is_running
    observer.on_frozen()
    timer.stop()
    assert clock.is_running  # nobody waits any more


async def test_a_call_that_begins_at_a_frozen_replica_is_not_busy() -> None:
    clock = Clock()
    clock.start()
    observer = ReplicaObserver(Record(), CallTimer(clock))  # type: ignore[arg-type]
    replica: Any = Replica()
    replica.frozen = True
    observer.assign(replica)
    observer.on_frozen()
    observer.mark_begun()
    assert not clock.is_running
    observer.on_thawed()
    assert clock.is_running
