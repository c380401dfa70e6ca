from types import SimpleNamespace

import pytest

from polar.bridges.engines import TrainerEngines
from polar.config import EngineSettings
from polar.errors import ConfigError


async def test_a_run_without_engines_can_not_be_probed() -> None:
    async def engines() -> dict[str, list[object]]:
        return {"replicas": []}

    with pytest.raises(ConfigError, match="The run has no engines to probe"):
        await TrainerEngines(SimpleNamespace(engines=engines)).probe(lambda *_: [], 16, EngineSettings())
