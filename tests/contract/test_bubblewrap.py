"""The contract, kept by `bubblewrap`, with the machine's own root: all of it as root; for an ordinary user, what the
kernel allows. Needs the package bubblewrap."""

import pytest

from polar.runtimes.bubblewrap import Bubblewrap
from polar.runtimes.bubblewrap.privileges import may_mount
from polar.runtimes.cgroups import CgroupHierarchies
from polar.testing.runtimes import ALL_PROMISES, Promise, RuntimeContract

pytestmark = pytest.mark.runtimes

_PROMISES: dict[str, Promise] = {"memory": "memory", "pids": "processes", "cpu": "cpu"}


def _kept() -> frozenset[Promise]:
    if may_mount():
        return ALL_PROMISES
    return ALL_PROMISES - {"disk"} - {_PROMISES[name] for name in CgroupHierarchies.detect().missing_controllers}


class TestBubblewrap(RuntimeContract):
    plugin = Bubblewrap
    promises = _kept()
