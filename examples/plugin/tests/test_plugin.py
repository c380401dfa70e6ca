"""What these plug-ins promise beyond the contracts."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from polar_example_plugin.exporter import AdvantageExporter
from polar_example_plugin.harness import Oneshot
from polar_example_plugin.runtime import TemplateBackend

from polar.harnesses.base import SetupRequest, write_setup
from polar.runtimes.base import RuntimeSpec
from polar.testing.exporters import export_samples
from polar.testing.gateway import LoopbackGateway, ScriptedEngineServer


def test_the_answer_is_what_the_model_said(
    scripted_engine: ScriptedEngineServer, polar_gateway: LoopbackGateway, tmp_path: Path
) -> None:
    scripted_engine.play("Hello, teal!")
    harness, home = Oneshot(), tmp_path / "home"
    request = SetupRequest(str(home), str(tmp_path), polar_gateway.url, polar_gateway.key, "polar")
    write_setup(harness.setup(request), home)
    variables = os.environ | polar_gateway.environment() | {"HOME": str(home)}
    subprocess.run(harness.build_command("Greet me.", {}), env=variables, cwd=tmp_path, check=True)
    assert (tmp_path / "answer.txt").read_text() == "Hello, teal!"
    (exchange,) = polar_gateway.exchanges()
    assert exchange.sampled_ids is not None
    (trace,) = polar_gateway.trajectory().traces
    assert trace.response_ids.tolist() == exchange.sampled_ids.tolist()
    assert trace.loss_mask.all()


@pytest.mark.asyncio
async def test_a_workspace_begins_as_the_template(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    (template / "greeting.txt").write_text("Hello.")
    backend = TemplateBackend(tmp_path / "state", "http://127.0.0.1:1")
    assert backend.check_image(str(template)) is None
    assert "is no folder" in str(backend.check_image("nowhere"))
    try:
        runtime = await backend.create("one", RuntimeSpec(image=str(template)))
        await runtime.start()
        assert (await runtime.run(["cat", "greeting.txt"], output=tmp_path / "output")).exit_code == 0
    finally:
        await backend.close()
    assert (tmp_path / "output").read_text() == "Hello."


@pytest.mark.asyncio
async def test_advantages_are_over_a_group(tmp_path: Path) -> None:
    data = await export_samples(AdvantageExporter(), tmp_path)
    rows = [json.loads(line) for line in data.splitlines()]
    by_session = {row["session_id"]: row["advantage"] for row in rows}
    assert by_session["good"] == -by_session["bad"] == 1.0
    assert by_session["delegating"] == 0.0  # alone in its group
