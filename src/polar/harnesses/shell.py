"""shell: any command line, run with `sh -c`. Nothing is installed or configured for it.

The environment points the providers' client libraries at the gateway, as for every harness. `{{INSTRUCTION}}` in the
command line stands for the instruction, quoted as one word of the shell's; POLAR_INSTRUCTION holds it, too.

Settings:
    command    the command line (a task's `custom_shell.command`)
"""

import shlex
from typing import Any

from msgspec import Struct

from polar.errors import ConfigError
from polar.harnesses.base import Knowledge, Package, Setup, Wanted
from polar.harnesses.settings import read_settings

_PLACE = "{{INSTRUCTION}}"


class _Settings(Struct, frozen=True, forbid_unknown_fields=True):
    command: str | None = None


class Shell:
    name = "shell"
    executables: tuple[str, ...] = ()  # `polar capture -- sh ...` runs whatever it runs
    default_model = "polar"
    knowledge = Knowledge()
    package: Package | None = None
    skills = None
    takes_mcp = False
    logs: tuple[str, ...] = ()

    def setup(self, wanted: Wanted) -> Setup:
        read_settings(self.name, wanted.settings, _Settings)
        return Setup()

    def command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        command = read_settings(self.name, settings, _Settings).command
        if not command:
            raise ConfigError(
                "The harness shell needs a command line: name it in the task's custom_shell.command, or another "
                "harness in agent.harness (--harness)."
            )
        quoted = shlex.quote(instruction)
        script = f"POLAR_INSTRUCTION={quoted}; export POLAR_INSTRUCTION\n{command.replace(_PLACE, quoted)}"
        return ["sh", "-c", script]
