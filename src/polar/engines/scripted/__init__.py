"""An engine without a model: plays written or random turns through a real tokenizer, and speaks vLLM's HTTP API."""

from polar.engines.scripted.play import Play, PlaySet, ScriptedTurn
from polar.engines.scripted.server import TOKENIZER_FOLDER, ScriptedServer

__all__ = ["TOKENIZER_FOLDER", "Play", "PlaySet", "ScriptedServer", "ScriptedTurn"]
