"""Any OpenAI-compatible chat endpoint. Token ids and log-probabilities are taken where it gives them, and asked for
only where the user says that it can (`logprobs`); calls without ids are captured as text and marked as untrainable."""

from polar.engines.base import Capabilities
from polar.engines.chat import ChatEngine


class OpenAIEngine(ChatEngine):
    capabilities = Capabilities(logprobs="raw")
