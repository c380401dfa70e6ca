"""polar engine: the embedded engine by itself."""

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
@click.option("--model", type=click.Path(path_type=Path), help="the model's folder [default: SmolLM2-135M-Instruct]")
@click.option("--name", help="of the model, as clients call it [default: the folder's]")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=int, default=8000, show_default=True, help="0 takes a free one")
@click.option("--device", help="cpu, cuda, cuda:1, ... [default: a GPU where there is one]")
@click.option("--dtype", help="of weights and cache [default: float32 on a CPU, bfloat16 on a GPU]")
@click.option("--threads", type=int, help="of the CPU [default: torch's own choice]")
@click.option("--context-length", type=int, help="of prompt and reply together [default: 2048]")
@click.option("--memory-gib", type=float, help="of keys and values [default: 2 on a CPU, 8 on a GPU]")
@click.option("--max-requests", type=int, help="that are sampled at the same time [default: 256]")
@click.option("--max-batch-tokens", type=int, help="in one pass of the model [default: 1024]")
@click.option("--state", help="file that remembers the last update of the weights, for a restart")
@log_options
def command(
    model: Path | None,
    name: str | None,
    log_format: logs.LogFormat | None,
    log_level: logs.LogLevel | None,
    **given: Any,
) -> None:
    """Serve a Hugging Face model with vLLM's API, for training: token ids in and out, log-probabilities, and weights
    that are replaced in place."""
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
