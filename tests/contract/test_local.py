"""The contract, kept by `local`: no walls, no limit of the disk; the others where cgroups can be made."""

import pytest

from polar.runtimes.cgroups import CgroupHierarchies
from polar.runtimes.local import Local
from polar.testing.runtimes import Promise, RuntimeContract

_LIMITS: frozenset[Promise] = frozenset({"memory", "processes", "cpu"})

pytestmark = pytest.mark.runtimes


class TestLocal(RuntimeContract):
    plugin = Local
    promises = frozenset() if CgroupHierarchies.detect().missing_controllers else _LIMITS
