"""The contract, kept by `bubblewrap`: all of it, with the machine's own root. Needs root and the package bubblewrap."""

import pytest

from polar.runtimes.bubblewrap import Bubblewrap
from tests.contract.runtimes import EVERYTHING, RuntimeContract

pytestmark = pytest.mark.runtimes


class TestBubblewrap(RuntimeContract):
    kind_class = Bubblewrap
    promises = EVERYTHING
