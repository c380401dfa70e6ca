"""The contract, kept by `docker`, against a real daemon on this machine (make test-containers)."""

import pytest

from polar.runtimes.containers import Docker
from tests.contract.containers import ContainerContract

pytestmark = pytest.mark.containers


class TestDocker(ContainerContract):
    plugin = Docker
