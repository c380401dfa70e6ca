"""`command`: runs the task's command over the agent's work in a fresh runtime.

The reward is 1 if the command exits with 0, else 0; with `reward_file`, the number that the command wrote there; with
`expected_output_json`, whether the command printed the expected outcome of each test.

The agent's version of the reward file is removed before the command starts. The file is read from outside, when every
process inside is dead, so nothing that still runs can write it. A time-out and a lack of memory are rewards of 0.

A command that exits with 0 must have written a number. If it has not, either the task or the agent's code is to blame:
the command runs again without the agent's work, and only if there is no number then, either, is there no reward
(GraderError). The same holds for a program that is not found, if a fresh runtime lacks it, too.

Limits: the agent's code, if the command imports it, can exit with 0, print anything and write the reward file. Authors
who train with such a task should run the agent's code as a process and compare its output, from a script that is among
`files` and imports nothing from the workspace (`python -I`), or use the evaluator `tests`. A process that the command
starts is still the same user: it can read the grader's files, and reach its memory, output and reward file. See
docs/evaluators.md.
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

_MAX_REWARD_BYTES = 4096
_EXIT_NOT_FOUND = 127  # as in shells
_EXIT_SIGNAL_BASE = 128  # plus the signal's number


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
            grading = await workspace.prepare_grading(work, self._config, self._build_env(work))
            evidence = grading.evidence
            work.evidence.extend(evidence)
            run = await self._run(work, grading.runtime, "evaluator.log")
        except UngradableWorkError as error:
            return Verdict(0.0, detail={"why": str(error)}, evidence=evidence)
        if not work.live:
            await self._check_grader(work, run)
        return replace(self._make_verdict(run), evidence=evidence)

    async def _check_grader(self, work: GradingContext, run: _CommandRun) -> None:
        """Raises GraderError where the command fails without the agent's work, too."""
        if run.lacks_reward:
            runtime = await work.create_fresh_runtime()
            await workspace.upload_grader_files(work, runtime, self._config)
            if (await self._run(work, runtime, "evaluator-without-agent.log")).lacks_reward:
                raise GraderError("config.command exits with 0 and writes no number into its reward_file.")
        elif run.completed.exit_code == _EXIT_NOT_FOUND and (program := self._find_program(work)) is not None:
            lookup = await (await work.create_fresh_runtime()).run(["sh", "-c", 'command -v -- "$1"', "sh", program])
            if lookup.exit_code != 0:
                raise GraderError(f"config.command: the runtime has no program {program}.")

    def _find_program(self, work: GradingContext) -> str | None:
        """The program that the command starts, if the agent is not expected to make it: a bare name that is looked up
        in the default PATH."""
        command = self._config.command
        first = command.split()[0] if isinstance(command, str) else command[0]
        looked_up = re.fullmatch(r"[A-Za-z][\w.+-]*", first) is not None
        return first if looked_up and "PATH" not in work.task.runtime.env | self._build_env(work) else None

    def _build_env(self, work: GradingContext) -> dict[str, str]:
        return (work.task.evaluator.env if work.task.evaluator is not None else {}) | self._config.env

    async def _run(self, work: GradingContext, runtime: Runtime, log: str) -> _CommandRun:
        config = self._config
        if config.reward_file is not None:
            await workspace.create_empty_file(work, runtime, config.reward_file, config)
        completed = await runtime.run(
            ["sh", "-c", config.command] if isinstance(config.command, str) else config.command,
            env=self._build_env(work),
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
        local_path = work.scratch / f"reward-{runtime.id}"
        try:
            await workspace.get(
                runtime, workspace.to_absolute(runtime, config.reward_file), local_path, _MAX_REWARD_BYTES
            )
            return parse_number(local_path.read_text())
        except (UngradableWorkError, UnicodeDecodeError, IsADirectoryError):
            return None

    def _make_verdict(self, run: _CommandRun) -> Verdict:
        completed = run.completed
        detail: dict[str, Any] = {"exit_code": completed.exit_code, "seconds": completed.seconds}
        if completed.timed_out:
            return Verdict(0.0, detail=detail | {"why": "The command took too long."})
        if completed.out_of_memory:
            return Verdict(0.0, detail=detail | {"why": "The command ran out of memory."})
        if completed.exit_code is not None and completed.exit_code > _EXIT_SIGNAL_BASE:
            # Only what the command ran can have killed it: a number that it left can't be trusted.
            return Verdict(0.0, detail=detail | {"why": "The command was killed."})
        if run.reward is None:
            return Verdict(0.0, detail=detail | {"why": f"There is no number in {self._config.reward_file}."})
        return Verdict(run.reward, detail=detail)


def parse_number(text: str) -> float | None:
    """Parses a finite number; None where the text is not one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def parse_outcomes(output: str) -> dict[str, str]:
    """Parses lines such as `PASSED test_file.py::Class::test_name - ...`, by full name and by `Class.test_name`."""
    outcomes: dict[str, str] = {}
    for line in output.splitlines():
        outcome, _, rest = line.strip().partition(" ")
        if outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"):
            name = rest.split(" - ")[0].strip()
            outcomes[name] = outcome
            if "::" in name:
                outcomes[".".join(name.split("::")[1:])] = outcome
    return outcomes
