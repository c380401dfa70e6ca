"""SGLang, through its chat API.

Its chat API gives token ids (`return_prompt_token_ids`, `return_meta_info`) with whole replies only. Exact data comes
before early tokens, so a streaming harness gets keep-alives and then the reply in one piece.
"""

from collections.abc import AsyncGenerator

from polar.engines.base import Chunk
from polar.engines.vllm import VllmEngine
from polar.types import Request


class SglangEngine(VllmEngine):
    extra_fields = b'"return_prompt_token_ids":true,"return_meta_info":true'

    def generate(self, request: Request, *, stream: bool) -> AsyncGenerator[Chunk, None]:  # noqa: ARG002
        return super().generate(request, stream=False)
