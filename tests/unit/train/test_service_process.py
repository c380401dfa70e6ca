"""The rollout service as a child of the trainer."""

import os
from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.train import service_process
from polar.train.service_process import ServiceProcess
from polar.train.settings import TrainSettings


async def test_a_service_that_never_speaks_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = "import sys, time; print('loading', file=sys.stderr, flush=True); time.sleep(600)"
    monkeypatch.setattr(service_process, "_PROGRAM", silent)
    monkeypatch.setattr(service_process, "_START_SECONDS", 2.0)
    service = ServiceProcess(TrainSettings(steps=1, tasks={"train": ["x"]}), {}, tmp_path)
    with pytest.raises(ConfigError, match=r"did not start within 2 s: loading"):
        async with service:
            pass
    assert service.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(service.pid, 0)
