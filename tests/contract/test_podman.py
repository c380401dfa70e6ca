"""The contract, kept by `podman` (make test-containers). As an ordinary user it keeps limits on cgroups v2 only."""

import os
from pathlib import Path

import pytest

from polar.runtimes.containers import Podman
from polar.testing.runtimes import ALL_PROMISES, Promise
from tests.contract.containers import ContainerContract

pytestmark = pytest.mark.containers

_LIMITS: frozenset[Promise] = frozenset({"cpu", "memory", "processes", "disk"})


def _kept() -> frozenset[Promise]:
    limited = os.geteuid() == 0 or Path("/sys/fs/cgroup/cgroup.controllers").exists()
    return ALL_PROMISES - {"disk"} if limited else ALL_PROMISES - _LIMITS


class TestPodman(ContainerContract):
    plugin = Podman
    promises = _kept()
