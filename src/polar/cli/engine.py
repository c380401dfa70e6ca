"""polar engine: serves the embedded engine by itself."""

import os
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from polar.cli.common import log_options, run_async
from polar.distribution import install_hint
from polar.errors import ConfigError
from polar.telemetry import logs


@click.command("engine")
@click.option(
    "--model", type=click.Path(path_type=Path), help="Serve the model in this folder [default: SmolLM2-135M-Instruct]."
)
@click.option("--name", help="Set the name by which clients request the model [default: the folder's].")
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen at this address.")
@click.option("--port", type=int, default=8000, show_default=True, help="Listen at this port; 0 chooses a free one.")
@click.option("--device", help="Compute on cpu, cuda, cuda:1, ... [default: a GPU if there is one].")
@click.option("--dtype", help="Set the type of weights and cache [default: float32 on a CPU, bfloat16 on a GPU].")
@click.option("--threads", type=int, help="Use this many CPU threads [default: torch's choice].")
@click.option("--context-length", type=int, help="Limit prompt and reply to so many tokens [default: 2048].")
@click.option("--memory-gib", type=float, help="Limit the KV cache [default: 2 on a CPU, 8 on a GPU].")
@click.option("--max-requests", type=int, help="Sample this many requests at a time [default: 256].")
@click.option("--max-batch-tokens", type=int, help="Limit a forward pass to so many tokens [default: 1024].")
@click.option("--state", help="Record weight updates in this file, so that a restart loads the last one.")
@log_options
def command(
    model: Path | None,
    name: str | None,
    log_format: logs.LogFormat | None,
    log_level: logs.LogLevel | None,
    **given: Any,
) -> None:
    """Serve a Hugging Face model with vLLM's API, for training: token ids in and out, log-probabilities, and in-place
    weight updates."""
    from polar.engines.embedded.options import EmbeddedOptions

    logs.configure(log_format or "text", log_level or "warning", [])
    try:
        options = EmbeddedOptions.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}.") from error
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read when torch is imported
    try:
        from polar.engines.embedded.server import serve
    except ImportError as error:
        raise ConfigError(f"The embedded engine needs the extra `train`: {install_hint('train')} ({error}).") from error
    run_async(serve(model, options, name=name))
