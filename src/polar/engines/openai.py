"""Any OpenAI-compatible chat endpoint. Token ids are taken where it gives them; calls without are captured as text and
marked as untrainable. Log-probabilities are asked for unless the settings say `logprobs = false`."""

from polar.engines.base import Capabilities
from polar.engines.chat import ChatEngine


class OpenAIEngine(ChatEngine):
    capabilities = Capabilities(logprobs="raw")
