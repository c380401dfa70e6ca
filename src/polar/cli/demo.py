"""polar demo: a real agent, a real tool loop, and what was captured of it."""

import shutil
import tempfile
from pathlib import Path

import click
from rich.console import Console

from polar.cli.capture import capture
from polar.cli.common import config_option, data_option, json_option, load_settings, run
from polar.cli.show import show
from polar.cli.verify import report, verify
from polar.errors import ConfigError
from polar.harnesses import load_harness

INSTRUCTION = "Create a file polar.txt that says hello, then read it back."


@click.command("demo")
@config_option
@data_option
@click.option("--harness", default="pi", show_default=True, help="the agent to run")
@json_option
def command(config_path: Path | None, data: Path, harness: str, as_json: bool) -> int:
    """Capture a real agent run, show its tree and verify it. Without an engine configured, a scripted one answers."""
    preset = load_harness(harness)
    argv = preset.command(INSTRUCTION, {"json": False})
    if shutil.which(argv[0]) is None:
        raise ConfigError(f"{argv[0]!r} is not on PATH: run `make demo`, which installs pi, or name another --harness.")
    settings = load_settings(config_path, gateway={"port": 0, "host": "127.0.0.1"})
    console = Console(stderr=True)
    console.print(f"[bold]{' '.join(argv[:-1])}[/] {INSTRUCTION!r}, unmodified, against Polar's gateway:")
    with tempfile.TemporaryDirectory() as workspace:
        status = run(
            capture(settings, data, argv, harness=harness, model=None, as_json=as_json, folder=Path(workspace))
        )
    if as_json:
        return status
    run(show(settings, data, None))
    return status or report(run(verify(settings, data, ())))
