"""The model of a run: what its prompts are rendered for, and so what each of its engines must have.

An engine with another vocabulary would take the ids of a prompt for other tokens, and nobody would notice. So an engine
is asked before its first call which model it serves, and for the ids of a known text; one that differs is refused.
"""

import asyncio
import logging
from pathlib import Path

from polar.config import EngineSettings
from polar.engines.base import Engine
from polar.errors import ConfigError, EngineError
from polar.rendering.model_codec import resolve_model_folder
from polar.rendering.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

_PROBE_TEXT = "The naïve fox – 東京 – jumps over 31415 lazy dogs:\n\tdef f(x):  return x**2  # 🙂"
_MAX_CONTROL_TOKENS = 256


class ModelMismatchError(EngineError):
    """An engine has another model than its run."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="overloaded", retry_elsewhere=True)


class RunModel:
    """Named by the run's settings, else that of the default run, else that of the first engine that tells."""

    def __init__(
        self, run: str, settings: EngineSettings, *, name: str | None = None, default: "RunModel | None" = None
    ) -> None:
        """`name`: of the model, where the run names one; `default`: the default run's, where the run has the same."""
        self.settings = settings
        self._run = run
        self._name = name
        self._default = default
        self._tokenizer_folder: str | None = None

    @property
    def tokenizer_folder(self) -> str | None:
        """None until an engine was found to have this vocabulary."""
        if self._tokenizer_folder is None and self._default is not None:
            return self._default.tokenizer_folder
        return self._tokenizer_folder

    async def check(self, engine: Engine) -> None:
        """Raises ModelMismatchError where an engine, which has been started, has another model. What an engine can't
        tell is not held against it."""
        served = engine.capabilities.models
        if self._name is not None and served and not {self._name, Path(self._name).name}.intersection(served):
            raise ModelMismatchError(
                f"{engine.url} serves {', '.join(served)}, and the run {self._run} has the model {self._name}: add an "
                f"engine with that model, or name another one (PUT /runs/{self._run}, engine)."
            )
        if not engine.capabilities.accepts_token_ids:
            return
        folder = self.tokenizer_folder or engine.find_tokenizer_folder()
        if folder is None or self.settings.render == "engine":
            return
        try:
            path = await asyncio.to_thread(resolve_model_folder, folder)
            tokenizer = await asyncio.to_thread(load_tokenizer, path)
        except ConfigError as error:
            log.warning("The vocabulary of %s is not checked: %s", engine.url, error)
            return
        if not await _has_vocabulary(engine, tokenizer):
            raise ModelMismatchError(
                f"{engine.url} serves {', '.join(served) or 'a model'} with another vocabulary than {folder}, the "
                f"tokenizer of the run {self._run}: it would take a prompt's ids for other tokens. Add an engine with "
                f"the run's model, or give a run of its own the other one (PUT /runs/NAME, engine)."
            )
        self._tokenizer_folder = folder


async def _has_vocabulary(engine: Engine, tokenizer: Tokenizer) -> bool:
    """Whether an engine has the ids of a text, and those of the control tokens, as this tokenizer has them."""
    ids = await engine.tokenize(_PROBE_TEXT)
    if ids is None:
        return True
    if ids != tokenizer.encode(_PROBE_TEXT):
        return False
    control = "".join(list(tokenizer.added_tokens)[:_MAX_CONTROL_TOKENS])
    ids = await engine.tokenize(control) or []
    # Some servers take control tokens in a text for text: then their ids can't be known.
    return not set(tokenizer.added_tokens.values()).intersection(ids) or ids == tokenizer.encode(control)
