"""The embedded engine as an engine: vLLM's API, on a process of its own that is launched where none is configured."""

import asyncio
import importlib.util
from pathlib import Path

from polar.config import EngineSettings
from polar.engines.base import Capabilities
from polar.engines.embedded.engine_process import EngineProcess
from polar.engines.embedded.options import EmbeddedOptions
from polar.engines.vllm import VllmEngine
from polar.errors import ConfigError
from polar.models import ensure_default_model, show_progress


class EmbeddedEngine(VllmEngine):
    capabilities = Capabilities(logprobs="processed", accepts_token_ids=True, reports_weight_version=True)

    def __init__(self, url: str, settings: EngineSettings) -> None:
        super().__init__(url, settings)
        self.model = None  # `[engine] model` is a folder here; what it is called, the server says

    @staticmethod
    async def launch(settings: EngineSettings) -> EngineProcess:
        """`[engine] model` is a folder, or none for the default model; `[engine.options]` are those of options.py."""
        if missing := [name for name in ("torch", "transformers", "safetensors") if not importlib.util.find_spec(name)]:
            raise ConfigError(f"The embedded engine needs {', '.join(missing)}: pip install 'polar[train]'.")
        options = settings.parse_options(EmbeddedOptions)
        process = EngineProcess(await asyncio.to_thread(_resolve_model_folder, settings.model), options)
        await process.start()
        return process


def _resolve_model_folder(named: str | None) -> Path:
    if named is not None:
        return Path(named).expanduser()
    with show_progress() as progress:
        return ensure_default_model(progress)
