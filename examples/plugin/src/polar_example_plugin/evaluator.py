"""`keywords`: the share of expected words that stand in a file of the agent's workspace."""

import posixpath
from typing import Any, ClassVar

from pydantic import Field

from polar.evaluators.base import GradingContext, parse_config
from polar.records.session import Verdict
from polar.records.task import RequestModel
from polar.runtimes.base import TransferTooLargeError

MAX_FILE_BYTES = 1 << 20


class KeywordsConfig(RequestModel):
    """The task's `evaluator.config`."""

    words: list[str] = Field(min_length=1)
    file: str = "answer.txt"


class Keywords:
    needs_fresh_runtime: ClassVar[bool] = False  # it only reads

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = parse_config(KeywordsConfig, config)

    async def evaluate(self, work: GradingContext) -> Verdict:
        """What the agent left or failed to leave is a reward, however bad. What the platform fails to do (a
        SandboxError) is raised, and becomes a reason."""
        path = posixpath.join(work.task.runtime.workdir, self._config.file)
        here = work.scratch / "answer"
        try:
            await work.agent_runtime.get(path, here, max_bytes=MAX_FILE_BYTES)
        except FileNotFoundError:
            return Verdict(0.0, detail={"why": f"There is no {self._config.file}."})
        except TransferTooLargeError:
            return Verdict(0.0, detail={"why": f"{self._config.file} has more than {MAX_FILE_BYTES} bytes."})
        if not here.is_file() or here.is_symlink():
            return Verdict(0.0, detail={"why": f"{self._config.file} is no file."})
        text = here.read_text(encoding="utf-8", errors="replace").casefold()
        found = [word for word in self._config.words if word.casefold() in text]
        return Verdict(len(found) / len(self._config.words), detail={"found": found})
