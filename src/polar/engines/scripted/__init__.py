"""An engine without a model: plays written or random turns through a real tokenizer, and speaks vLLM's HTTP API."""

from polar.engines.scripted.play import Play, Plays, Turn
from polar.engines.scripted.server import TOKENIZER, ScriptedServer

__all__ = ["TOKENIZER", "Play", "Plays", "ScriptedServer", "Turn"]
