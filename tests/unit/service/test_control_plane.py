import asyncio
from pathlib import Path

import pytest

from polar.config import load
from polar.service import Service, control_plane


async def test_a_service_whose_control_plane_dies_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> bool:
        raise RuntimeError("the listener broke")

    monkeypatch.setattr(control_plane._ThreadedServer, "on_tick", fail)
    sections = {"engine": {"urls": ["http://127.0.0.1:1"]}, "gateway": {"port": 0}, "server": {"port": 0}}
    settings = load(None, {}, overrides=sections)
    async with Service(settings, tmp_path) as service, asyncio.timeout(30):
        assert await service.wait_for_failure() == "The control plane has failed: see the log."
