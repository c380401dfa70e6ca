"""The servers that are compared, each started as a process of its own."""

POLAR = "Polar"
OTHER = "Polar, other checkout"
FASTAPI = "FastAPI + httpx"
LITELLM = "LiteLLM"  # with the provider that any OpenAI-compatible server is named by
LITELLM_VLLM = "LiteLLM, hosted_vllm"  # with its provider for vLLM, which is lighter
RELAY = "aiohttp pass-through"
