"""The contract, kept by `podman` (make test-containers)."""

import pytest

from polar.runtimes.podman import Podman
from tests.contract.containers import ContainerContract

pytestmark = pytest.mark.containers


class TestPodman(ContainerContract):
    kind_class = Podman
