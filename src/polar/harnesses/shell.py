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
from polar.harnesses.base import CallPatterns, HarnessSetup, Package, SetupRequest, read_settings

_INSTRUCTION_PLACEHOLDER = "{{INSTRUCTION}}"


class _Settings(Struct, frozen=True, forbid_unknown_fields=True):
    command: str | None = None


class Shell:
    name = "shell"
    executables: tuple[str, ...] = ()  # `polar capture -- sh ...` runs whatever it runs
    default_model = "polar"
    call_patterns = CallPatterns()
    package: Package | None = None
    skills_folder = None
    supports_mcp = False
    log_paths: tuple[str, ...] = ()

    def setup(self, request: SetupRequest) -> HarnessSetup:
        read_settings(self.name, request.settings, _Settings)
        return HarnessSetup()

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        command = read_settings(self.name, settings, _Settings).command
        if not command:
            raise ConfigError(
                "The harness shell needs a command line: name it in the task's custom_shell.command, or another "
                "harness in agent.harness (--harness)."
            )
        quoted = shlex.quote(instruction)
        script = (
            f"POLAR_INSTRUCTION={quoted}; export POLAR_INSTRUCTION\n{command.replace(_INSTRUCTION_PLACEHOLDER, quoted)}"
        )
        return ["sh", "-c", script]
