"""mini-swe-agent (PyPI): `mini --yolo --exit-immediately -t "..."`. It speaks Chat, through LiteLLM.

The two flags are needed: its approval mode stands in the same config file as its prompts, which are its own. It takes
no MCP servers.

Settings:
    args    further words for its command line
"""

from pathlib import PurePosixPath
from typing import Any

from polar.harnesses.base import CallPatterns, CommonSettings, HarnessSetup, Package, SetupRequest, read_settings

_CONFIG_FOLDER = ".config/mini-swe-agent"


class MiniSweAgent:
    name = "mini_swe_agent"
    executables = ("mini", "mini-swe-agent")
    default_model = "polar"
    call_patterns = CallPatterns()
    package = Package("pypi", "mini-swe-agent", "2.4.6", "mini", extra_packages=("mcp",))  # LiteLLM needs it
    skills_folder = None
    supports_mcp = False
    log_paths = (f"{_CONFIG_FOLDER}/last_mini_run.traj.json",)

    def setup(self, request: SetupRequest) -> HarnessSetup:
        read_settings(self.name, request.settings, CommonSettings)
        return HarnessSetup(
            env={
                "MSWEA_GLOBAL_CONFIG_DIR": str(PurePosixPath(request.home, _CONFIG_FOLDER)),
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",  # nobody knows what our model costs
                "MSWEA_MODEL_NAME": f"openai/{request.model}",
                "OPENAI_API_BASE": f"{request.gateway_url}/v1",
                "OPENAI_BASE_URL": f"{request.gateway_url}/v1",
                "OPENAI_API_KEY": request.key,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches prices
            }
        )

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, CommonSettings)
        return ["mini", "--yolo", "--exit-immediately", *chosen.args, "-t", instruction]
