"""Ray, with two machines."""

from collections.abc import Iterator

import pytest

from tests.cluster.machines import RAY, Machines


@pytest.fixture(scope="module")
def cluster() -> Iterator[Machines]:
    """Machines "one" (Ray's head) and "two"; tests that kill machines add their own."""
    with Machines("one", "two") as machines:
        yield machines


@pytest.fixture(autouse=True)
def _client_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RAY.items():
        monkeypatch.setenv(name, value)
