from itertools import islice

from polar.backoff import add_jitter, backoff_delays


def test_each_delay_is_about_twice_the_last_up_to_a_limit() -> None:
    for delay, most in zip(islice(backoff_delays(1, 5), 6), (1, 2, 4, 5, 5, 5), strict=True):
        assert most / 2 <= delay <= most


def test_not_everybody_waits_as_long() -> None:
    assert len({add_jitter(1) for _ in range(100)}) > 50
