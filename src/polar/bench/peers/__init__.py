"""The servers that are compared, each started as a process of its own."""

POLAR = "Polar"
FASTAPI = "FastAPI + httpx"
LITELLM = "LiteLLM"
RELAY = "aiohttp pass-through"
