"""mini-swe-agent (PyPI): `mini --yolo --exit-immediately -t "..."`. It speaks Chat, through LiteLLM.

The two flags are needed: its approval mode stands in the same config file as its prompts, which are its own.
"""

from pathlib import Path

from polar.harnesses.base import Knowledge


class MiniSweAgent:
    name = "mini_swe_agent"
    executables = ("mini", "mini-swe-agent")
    default_model = "polar"
    knowledge = Knowledge()

    def configure(self, home: Path, gateway_url: str, key: str, model: str) -> dict[str, str]:
        return {
            "MSWEA_GLOBAL_CONFIG_DIR": str(home / ".config" / "mini-swe-agent"),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",  # nobody knows what our model costs
            "MSWEA_MODEL_NAME": f"openai/{model}",
            "OPENAI_API_BASE": f"{gateway_url}/v1",
            "OPENAI_BASE_URL": f"{gateway_url}/v1",
            "OPENAI_API_KEY": key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches prices
        }

    def command(self, instruction: str) -> list[str]:
        return ["mini", "--yolo", "--exit-immediately", "-t", instruction]
