"""`python -m polar.engines.embedded`: the engine as a child of the process that launched it (engine.py)."""

import os
import signal
import sys
from pathlib import Path

import click
import uvloop

from polar.engines.embedded.options import EmbeddedOptions
from polar.errors import PolarError
from polar.runtimes.linux import die_with_parent
from polar.telemetry import logs


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True, help="The model's folder.")
@click.option("--options", "document", required=True, help="EmbeddedOptions as JSON.")
@click.option("--parent", type=int, required=True, help="The process with which this one ends.")
def main(model: Path, document: str, parent: int) -> None:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we asked
        sys.exit(1)
    logs.configure()
    from polar.engines.embedded.server import serve  # which imports torch

    try:
        uvloop.run(serve(model, EmbeddedOptions.model_validate_json(document)))
    except PolarError as error:
        sys.exit(f"polar: {error}")


if __name__ == "__main__":
    main()
