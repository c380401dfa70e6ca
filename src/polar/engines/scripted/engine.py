"""The scripted engine as an engine: vLLM's API, on a server of our own that is launched where none is configured."""

import inspect

from polar.config import EngineSettings
from polar.engines.scripted.play import PlaySet
from polar.engines.scripted.server import TOKENIZER_FOLDER, ScriptedServer
from polar.engines.vllm import VllmEngine
from polar.errors import ConfigError


class ScriptedEngine(VllmEngine):
    def find_tokenizer_folder(self) -> str:
        """The server's own, where it was launched from these settings; the one that comes with it, where it wasn't."""
        return str(self._settings.tokenizer or self._settings.options.get("tokenizer") or TOKENIZER_FOLDER)

    @staticmethod
    async def launch(settings: EngineSettings) -> ScriptedServer:
        """`[engine.options]` are the server's own: `play` names a file, the others are ScriptedServer's arguments."""
        options = dict(settings.options)
        known = inspect.signature(ScriptedServer).parameters.keys()
        if unknown := options.keys() - known:
            raise ConfigError(f"[engine.options] {', '.join(sorted(unknown))}: unknown; known: {', '.join(known)}.")
        if settings.tokenizer is not None:
            options.setdefault("tokenizer", settings.tokenizer)
        play = options.pop("play", None)
        server = ScriptedServer(None if play is None else PlaySet.load(play), **options)
        await server.start()
        return server
