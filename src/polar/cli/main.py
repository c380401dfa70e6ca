"""The command line. Each command has a module, which is imported when the command is called."""

import sys
from importlib import import_module
from typing import Any

import click

from polar.distribution import DISTRIBUTION
from polar.errors import PolarError

_COMMANDS = {
    "capture": "Run any agent command against a private gateway and record every model call.",
    "run": "Run tasks in sandboxes, evaluate them and store their trajectories.",
    "tasks": "Make tasks from data sets such as SWE-bench.",
    "matrix": "Evaluate models in harnesses, as a table of pass@1.",
    "submit": "Send tasks to a server.",
    "status": "Print the runs, queues and nodes of a server, or one task.",
    "results": "Print a server's results in the order in which they ended.",
    "cancel": "Cancel tasks at a server.",
    "up": "Run the rollout server, with a gateway node in the same process.",
    "node": "Run a gateway node for a remote rollout server.",
    "engine": "Serve a model with the embedded engine and vLLM's API, for training.",
    "train": "Train a model by reinforcement learning on tasks.",
    "session": "Open and end sessions for harnesses that are run by hand.",
    "show": "Show a session as a readable tree.",
    "verify": "Check that every trainable token is exactly what was sampled.",
    "export": "Export sessions in a trainer's format.",
    "harness": "Install harnesses for any runtime.",
    "doctor": "Check what works on this machine, and what an engine can do.",
    "demo": "Train a small model to use a tool, on this machine.",
}


class _LazyGroup(click.Group):
    """Finds commands by name; importing all of them would take longer than most of them run."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"polar.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION)
def cli() -> None:
    """Reinforcement learning for language agents, without opening the agent."""


def main(arguments: list[str] | None = None) -> Any:
    try:
        status = cli.main(arguments, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except PolarError as error:
        click.echo(f"polar: {error}", err=True)
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)
