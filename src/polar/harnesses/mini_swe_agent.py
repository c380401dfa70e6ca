"""mini-swe-agent (PyPI): `mini --yolo --exit-immediately -t "..."`. It speaks Chat, through LiteLLM.

The two flags are needed: its approval mode stands in the same config file as its prompts, which are its own. It takes
no MCP servers.

Settings:
    args    further words for its command line
"""

from pathlib import PurePosixPath
from typing import Any

from polar.harnesses.base import Knowledge, Package, Setup, Wanted
from polar.harnesses.settings import Common, read_settings

_FOLDER = ".config/mini-swe-agent"


class MiniSweAgent:
    name = "mini_swe_agent"
    executables = ("mini", "mini-swe-agent")
    default_model = "polar"
    knowledge = Knowledge()
    package = Package("pypi", "mini-swe-agent", "2.4.6", "mini", beside=("mcp",))  # LiteLLM needs it
    skills = None
    takes_mcp = False
    logs = (f"{_FOLDER}/last_mini_run.traj.json",)

    def setup(self, wanted: Wanted) -> Setup:
        read_settings(self.name, wanted.settings, Common)
        return Setup(
            env={
                "MSWEA_GLOBAL_CONFIG_DIR": str(PurePosixPath(wanted.home, _FOLDER)),
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",  # nobody knows what our model costs
                "MSWEA_MODEL_NAME": f"openai/{wanted.model}",
                "OPENAI_API_BASE": f"{wanted.gateway_url}/v1",
                "OPENAI_BASE_URL": f"{wanted.gateway_url}/v1",
                "OPENAI_API_KEY": wanted.key,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches prices
            }
        )

    def command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, Common)
        return ["mini", "--yolo", "--exit-immediately", *chosen.args, "-t", instruction]
