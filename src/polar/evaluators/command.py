"""`command`: the task's own command, run over the agent's work in a fresh runtime.

The reward is 1 where it ends with 0, else 0; with `reward_file`, the number in that file as the command left it; with
`expected_output_json`, whether it printed that outcome for each test named there.

What the agent left at the reward file is removed before the command starts. The file is read from outside, when every
process inside is dead: nothing that was left running can write it. A time-out and a lack of memory are rewards of 0.

A command that ends with 0 must have written a number. Where it has not, that is the task's mistake, or something that
the agent's code brought about: it then runs once more without the agent's work, and only if there is no number then,
either, is there no reward (GraderError). Likewise for a program that can't be found, where no fresh runtime has it.

What this can't keep out: code of the agent's that the command imports can end its process with 0, print what it likes,
and write the reward file. Authors who train with such a task should run the agent's code as a process and compare what
it printed, from a script that is among `files` and imports nothing from the workspace (`python -I`); or use the
evaluator `tests`. A process that the command starts is still the same user: it can read the grader's files, and reach
its memory, output and reward file. docs/evaluators.md says what to do about it.
"""

import json
import math
import re
from typing import Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace
from pydantic import AliasChoices, Field, field_validator, model_validator

from polar.evaluators.base import GraderError, GradingContext, UngradableWorkError, parse_config
from polar.evaluators.transfer import workspace
from polar.evaluators.transfer.workspace import RuntimePath, TransferConfig
from polar.records.session import Evidence, Verdict
from polar.runtimes.base import CommandResult, Runtime, SandboxError

_MAX_REWARD_BYTES = 4096  # bytes
_EXIT_NOT_FOUND = 127  # as shells say it
_EXIT_SIGNAL_BASE = 128  # and more: the signal's number


class CommandConfig(TransferConfig):
    command: str | list[str] = Field(
        validation_alias=AliasChoices("command", "test_command"), description="words, or a line for `sh -c`"
    )
    reward_file: RuntimePath | None = None
    expected_output_json: dict[str, str] | None = Field(None, description="PASSED, FAILED, ... by the test's name")
    timeout_seconds: float = Field(600, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))
    cwd: str | None = Field(None, description="[default: the workspace]")
    env: dict[str, str] = Field({}, description="besides the evaluator's")

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: str | list[str]) -> str | list[str]:
        if not command or not command[0].strip():
            raise ValueError("it is empty")
        return command

    @field_validator("expected_output_json", mode="before")
    @classmethod
    def _parse_json(cls, expected: Any) -> Any:
        return json.loads(expected) if isinstance(expected, str) else expected

    @model_validator(mode="after")
    def _check_reward_source(self) -> "CommandConfig":
        if self.reward_file is not None and self.expected_output_json is not None:
            raise ValueError("it takes either `reward_file` or `expected_output_json`")
        return self

    def list_output_paths(self) -> list[str]:
        return [] if self.reward_file is None else [self.reward_file]

    def list_import_folders(self) -> list[str]:
        line = self.command if isinstance(self.command, str) else " ".join(self.command)
        return [self.cwd or "."] if workspace.imports_from_cwd(line) else []


class _CommandRun(Struct, frozen=True):
    completed: CommandResult
    reward: float | None  # None where there is no number in the reward file

    @property
    def lacks_reward(self) -> bool:
        return self.completed.exit_code == 0 and self.reward is None


class Command:
    needs_fresh_runtime: ClassVar[bool] = True

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = parse_config(CommandConfig, config)
        files = [file.target for file in self._config.files]
        self.private_paths = [*files, *filter(None, [self._config.reward_file])]

    async def evaluate(self, work: GradingContext) -> Verdict:
        evidence: list[Evidence] = []
        try:
            grading = await workspace.prepare_grading(work, self._config, self._env(work))
            evidence = grading.evidence
            work.evidence.extend(evidence)
            ran = await self._run(work, grading.runtime, "evaluator.log")
        except UngradableWorkError as error:
            return Verdict(0.0, detail={"why": str(error)}, evidence=evidence)
        if not work.live:
            await self._check_grader(work, ran)
        return replace(self._verdict(ran), evidence=evidence)

    async def _check_grader(self, work: GradingContext, ran: _CommandRun) -> None:
        """Raises GraderError where the command can't do its work, whatever the agent did."""
        if ran.lacks_reward:
            runtime = await work.create_fresh_runtime()
            await workspace.upload_grader_files(work, runtime, self._config)
            if (await self._run(work, runtime, "evaluator-without-agent.log")).lacks_reward:
                raise GraderError("config.command ends with 0 and writes no number into its reward_file.")
        elif ran.completed.exit_code == _EXIT_NOT_FOUND and (program := self._find_program(work)) is not None:
            found = await (await work.create_fresh_runtime()).run(["sh", "-c", 'command -v -- "$1"', "sh", program])
            if found.exit_code != 0:
                raise GraderError(f"config.command: there is no program {program} in the runtime.")

    def _find_program(self, work: GradingContext) -> str | None:
        """What the command starts, where no agent can be meant to make it: a name that is looked up, and not in a
        PATH of the task's."""
        command = self._config.command
        first = command.split()[0] if isinstance(command, str) else command[0]
        looked_up = re.fullmatch(r"[A-Za-z][\w.+-]*", first) is not None
        return first if looked_up and "PATH" not in work.task.runtime.env | self._env(work) else None

    def _env(self, work: GradingContext) -> dict[str, str]:
        return (work.task.evaluator.env if work.task.evaluator is not None else {}) | self._config.env

    async def _run(self, work: GradingContext, runtime: Runtime, log: str) -> _CommandRun:
        config = self._config
        if config.reward_file is not None:
            await workspace.create_empty_file(work, runtime, config.reward_file, config)
        completed = await runtime.run(
            ["sh", "-c", config.command] if isinstance(config.command, str) else config.command,
            env=self._env(work),
            cwd=None if config.cwd is None else workspace.to_absolute(runtime, config.cwd),
            timeout=config.timeout_seconds,
            output=work.logs / log,
        )
        if completed.exit_code is None and not completed.timed_out and not completed.out_of_memory:
            raise SandboxError("The grader's runtime was stopped while its command ran.")
        if not work.live:
            await runtime.stop()
        return _CommandRun(completed, await self._read_reward(work, runtime, completed, log))

    async def _read_reward(
        self, work: GradingContext, runtime: Runtime, completed: CommandResult, log: str
    ) -> float | None:
        config = self._config
        if config.expected_output_json is not None:
            printed = parse_outcomes((work.logs / log).read_text(errors="replace"))
            return float(all(printed.get(name) == outcome for name, outcome in config.expected_output_json.items()))
        if config.reward_file is None:
            return float(completed.exit_code == 0)
        here = work.scratch / f"reward-{runtime.id}"
        try:
            await workspace.get(runtime, workspace.to_absolute(runtime, config.reward_file), here, _MAX_REWARD_BYTES)
            return parse_number(here.read_text())
        except (UngradableWorkError, UnicodeDecodeError, IsADirectoryError):
            return None

    def _verdict(self, ran: _CommandRun) -> Verdict:
        completed = ran.completed
        detail: dict[str, Any] = {"exit_code": completed.exit_code, "seconds": completed.seconds}
        if completed.timed_out:
            return Verdict(0.0, detail=detail | {"why": "The command took too long."})
        if completed.out_of_memory:
            return Verdict(0.0, detail=detail | {"why": "The command ran out of memory."})
        if completed.exit_code is not None and completed.exit_code > _EXIT_SIGNAL_BASE:
            # By whom else than by what it ran: a number that it left is not to be trusted.
            return Verdict(0.0, detail=detail | {"why": "The command was killed."})
        if ran.reward is None:
            return Verdict(0.0, detail=detail | {"why": f"There is no number in {self._config.reward_file}."})
        return Verdict(ran.reward, detail=detail)


def parse_number(text: str) -> float | None:
    """The finite number that a text is; None where it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def parse_outcomes(output: str) -> dict[str, str]:
    """Lines such as `PASSED test_file.py::Class::test_name - ...`, by the whole name and by `Class.test_name`."""
    found: dict[str, str] = {}
    for line in output.splitlines():
        outcome, _, rest = line.strip().partition(" ")
        if outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"):
            name = rest.split(" - ")[0].strip()
            found[name] = outcome
            if "::" in name:
                found[".".join(name.split("::")[1:])] = outcome
    return found
