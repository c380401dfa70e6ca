"""The command line of the benchmarks: `python -m benchmarks NAME [options]`, from a checkout of Polar."""

import sys
from importlib import import_module

import click

from polar.errors import ConfigError, PolarError

BENCHMARKS = {
    "gateway": ("benchmarks.gateway.benchmark", "Measure CPU per captured call, added latency, streams and memory."),
    "fidelity": ("benchmarks.fidelity.benchmark", "Count the tokens of real harnesses that train in a wrong context."),
    "trajectory": ("benchmarks.trajectory.benchmark", "Measure the token tree, storage and rendering."),
    "tree": ("benchmarks.tree.benchmark", "Measure a training step with each builder: time, FLOPs, memory."),
    "sandbox": ("benchmarks.sandbox", "Measure how fast sandboxes start, against docker run."),
    "pipeline": ("benchmarks.pipeline.benchmark", "Measure how busy the node's stages keep an engine."),
    "service": ("benchmarks.service.benchmark", "Measure the rollout service's throughput, results and long queues."),
    "tax": ("benchmarks.tax.benchmark", "Measure what capturing takes from an engine's throughput."),
    "stall": ("benchmarks.stall.benchmark", "Measure what a caller with the longest bodies costs other callers."),
    "soak": ("benchmarks.soak.benchmark", "Check that the service's memory stops growing."),
    "verify": ("benchmarks.verify.benchmark", "Measure what the automatic check of sessions costs."),
    "vllm": ("benchmarks.vllm.benchmark", "Measure a vLLM server through a capturing gateway and without it."),
    "vllm-updates": ("benchmarks.vllm.updates", "Update a vLLM server's weights while sessions run."),
}
"""The module that has a benchmark's `command`, and its line of help."""


class _LazyGroup(click.Group):
    """Imports a benchmark when it is called: some need PyTorch, others FastAPI."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in BENCHMARKS:
            return None
        try:
            command: click.Command = import_module(BENCHMARKS[cmd_name][0]).command
        except ImportError as error:
            raise ConfigError(f"{cmd_name} needs what is not installed here ({error}): run `make setup`.") from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Benchmarks"):
            formatter.write_dl([(name, line) for name, (_, line) in BENCHMARKS.items()])


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Measure Polar against its peers, in one run on this machine. Only loopback is used."""


def main(arguments: list[str] | None = None) -> None:
    try:
        status = cli.main(arguments, prog_name="python -m benchmarks", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except PolarError as error:
        click.echo(f"benchmarks: {error}", err=True)
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
