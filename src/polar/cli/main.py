"""The command line. Each command lives in a module of its own, which is imported when it is called."""

import sys
from importlib import import_module
from typing import Any

import click

from polar.distribution import DISTRIBUTION
from polar.errors import PolarError

_COMMANDS = {
    "capture": "run any agent command against a private gateway and keep every model call",
    "run": "run tasks in sandboxes, evaluate them and keep their trajectories",
    "tasks": "tasks made of data sets, such as SWE-bench's",
    "matrix": "models over harnesses: a table of pass@1",
    "submit": "send tasks to a server",
    "status": "what goes on at a server: runs, queues, nodes; or one task",
    "results": "what came of tasks at a server, in the order in which they ended",
    "cancel": "end tasks at a server",
    "up": "run the rollout server, with a gateway node in the same process",
    "node": "a gateway node for a rollout server elsewhere",
    "engine": "the embedded engine by itself: a model with vLLM's API, for training",
    "train": "reinforcement learning: tasks in, a better model out",
    "session": "a session for a harness that is run by hand",
    "show": "a session as a readable tree",
    "verify": "check that every trainable token is exactly what was sampled",
    "export": "sessions in a trainer's format",
    "harness": "install harnesses, for any runtime",
    "doctor": "what works here, and what an engine can do",
    "demo": "a small model learns to use a tool, on this machine",
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
