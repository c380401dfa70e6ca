"""Where calls go: they stay, they spread, and few of them move when replicas come and go."""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from polar.engines.pool import choose_replica, rank_replicas

MANY = 10_000


class Place:
    def __init__(self, number: int) -> None:
        self.url = f"http://engine-{number}:8000"
        self.running: set[object] = set()

    def __repr__(self) -> str:
        return f"{self.url} ({len(self.running)})"


def places(count: int) -> list[Place]:
    return [Place(number) for number in range(count)]


def begin(place: Place, calls: int = 1) -> None:
    place.running |= {object() for _ in range(calls)}


groups = st.text(max_size=8)


@given(group=groups, count=st.integers(1, 9), data=st.data())
def test_a_replica_that_goes_moves_only_the_groups_that_preferred_it(
    group: str, count: int, data: st.DataObject
) -> None:
    before = places(count + 1)
    gone = data.draw(st.sampled_from(before))
    after = [place for place in before if place is not gone]
    assert rank_replicas(group, after) == [place for place in rank_replicas(group, before) if place is not gone]


def test_a_replica_that_comes_gets_its_share_of_the_groups_and_no_more() -> None:
    old = places(4)
    new = Place(4)
    moved = [
        group
        for group in map(str, range(2_000))
        if rank_replicas(group, old)[0] is not rank_replicas(group, [*old, new])[0]
    ]
    assert all(rank_replicas(group, [*old, new])[0] is new for group in moved)
    assert 0.15 < len(moved) / 2_000 < 0.25


@given(count=st.integers(1, 8), calls=st.lists(groups, max_size=200))
def test_newcomers_are_spread_within_the_bound(count: int, calls: list[str]) -> None:
    """Whatever the groups: even if there is only one."""
    every = places(count)
    for begun, group in enumerate(calls, 1):
        begin(choose_replica(group, None, every, MANY))
        busiest = max(len(place.running) for place in every)
        assert busiest <= max(1, 1.25 * begun / count, (begun - 1) / count + 1)


@given(loads=st.lists(st.integers(0, 200), min_size=1, max_size=6), group=groups, data=st.data())
def test_a_session_stays_unless_its_replica_has_far_more_than_the_others(
    loads: list[int], group: str, data: st.DataObject
) -> None:
    every = places(len(loads))
    for place, load in zip(every, loads, strict=True):
        begin(place, load)
    home = data.draw(st.sampled_from(every))
    mean = (sum(loads) + 1) / len(loads)
    chosen = choose_replica(group, home, every, MANY)
    if len(home.running) < max(1.5 * mean, mean + 16):
        assert chosen is home
    else:
        assert len(chosen.running) < 1.25 * mean


@given(loads=st.lists(st.integers(0, 20), min_size=2, max_size=6), group=groups, most=st.integers(1, 10))
def test_a_full_replica_is_used_only_if_all_are_full(loads: list[int], group: str, most: int) -> None:
    every = places(len(loads))
    for place, load in zip(every, loads, strict=True):
        begin(place, load)
    for home in (None, *every):
        chosen = choose_replica(group, home, every, most)
        assert len(chosen.running) < most or min(loads) >= most
        if min(loads) >= most:
            assert len(chosen.running) == min(loads)


def test_those_leave_that_are_too_many_and_they_do_not_come_back() -> None:
    """A hundred sessions live at one replica, and two more replicas come."""
    old = Place(0)
    begin(old, 100)
    every = [old, Place(1), Place(2)]
    homes: dict[str, Place] = {}
    for session in map(str, range(100)):  # each makes its next call as its last one ends
        old.running.pop()
        homes[session] = choose_replica(session, old, every, MANY)
        begin(homes[session])
    counts = Counter(home.url for home in homes.values())
    assert counts[old.url] >= 100 / 3  # nobody left who need not
    assert max(counts.values()) <= 1.5 * 100 / 3 + 1
    for _ in range(3):  # and from now on everybody stays
        for session, home in homes.items():
            home.running.pop()
            assert choose_replica(session, home, every, MANY) is home
            begin(home)


def test_one_busy_moment_sends_a_session_away_once() -> None:
    home, other = every = places(2)
    begin(home, 40)
    away = choose_replica("session", home, every, MANY)
    assert away is other
    home.running.clear()
    for load in range(16):  # also when it is the busier one, within bounds
        assert choose_replica("session", away, every, MANY) is away
        begin(away)
        assert len(away.running) == load + 1


def test_a_new_replica_is_not_run_over() -> None:
    """It takes nobody away from a replica that can bear its load, and of the newcomers no more than its share."""
    every = places(8)
    for place in every:
        begin(place, 50)
    new = Place(8)
    for home in every:
        for session in range(50):
            home.running.pop()
            assert choose_replica(str(session), home, [*every, new], MANY) is home
            begin(home)
    for group in map(str, range(200)):
        begin(choose_replica(group, None, [*every, new], MANY))
        assert len(new.running) <= 1.25 * sum(len(place.running) for place in [*every, new]) / 9
    assert new.running


class Cached(Place):
    """A replica that remembers the longest prefix of each conversation and each group's prompt, up to a size."""

    def __init__(self, number: int, size: int) -> None:
        super().__init__(number)
        self._kept: dict[str, int] = {}
        self._size = size

    def sample(self, session: str, group: str, length: int, prompt: int) -> int:
        """The tokens that need not be computed."""
        hit = max(self._touch(session), min(self._touch(group), prompt))
        self._kept[session] = length
        self._kept[group] = prompt
        while sum(self._kept.values()) > self._size:
            del self._kept[next(iter(self._kept))]
        return hit

    def _touch(self, name: str) -> int:
        known = self._kept.pop(name, 0)
        if known:
            self._kept[name] = known
        return known


def hit_rate(route: Callable[[str, str, Sequence[Cached]], Cached]) -> float:
    """Groups of 8 sessions, whose calls come in any order, some at the same time; replicas can't keep everything."""
    random = Random(7)
    every = [Cached(number, size=150_000) for number in range(4)]
    sessions = [(f"{group}-{sample}", f"group {group}") for group in range(16) for sample in range(8)]
    lengths = {session: 500 for session, _ in sessions}
    asked = hits = 0
    running: list[tuple[Cached, object]] = []
    for _ in range(len(sessions) * 20):
        session, group = random.choice(sessions)
        place, call = route(session, group, every), object()
        place.running.add(call)
        running.append((place, call))
        if len(running) > 64:
            ended, over = running.pop(random.randrange(64))
            ended.running.discard(over)
        asked += lengths[session]
        hits += place.sample(session, group, lengths[session], 500)
        lengths[session] += random.randrange(50, 150)
    return hits / asked


def test_the_prefix_cache_is_used() -> None:
    homes: dict[str, Cached] = {}
    turn = iter(range(10**9))

    def sticky(session: str, group: str, every: Sequence[Cached]) -> Cached:
        homes[session] = choose_replica(group, homes.get(session), every, MANY)
        return homes[session]

    ours = hit_rate(sticky)
    in_turn = hit_rate(lambda _session, _group, every: every[next(turn) % len(every)])
    least_busy = hit_rate(lambda _session, _group, every: min(every, key=lambda place: len(place.running)))
    assert ours > 0.85
    assert ours > in_turn + 0.2
    assert ours > least_busy + 0.2


def test_sessions_of_a_group_meet_at_one_replica() -> None:
    """As far as the load allows: of 32 groups of 8, most sessions find their group's prompt where they go."""
    every = places(4)
    at: dict[str, set[str]] = {}
    random = Random(3)
    arrivals = [str(group) for group in range(32) for _ in range(8)]
    random.shuffle(arrivals)
    for group in arrivals:
        place = choose_replica(group, None, every, MANY)
        begin(place)
        at.setdefault(group, set()).add(place.url)
    computed = sum(len(urls) for urls in at.values())  # at which a group's prompt is computed
    assert computed < 32 * 2  # 4 each, were they dealt out in turn


def test_the_order_is_the_same_in_every_process() -> None:
    """Gateways that know nothing of each other send a group to the same replica: what decides is fixed for good."""
    every = places(5)
    assert [every.index(place) for place in rank_replicas("task", every)] == [3, 0, 4, 1, 2]
