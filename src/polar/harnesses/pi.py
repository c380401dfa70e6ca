"""pi (npm @earendil-works/pi-coding-agent): `pi -p "..."`.

It speaks all four APIs. The default is Chat; `--provider polar-responses`, `polar-anthropic` or `polar-google`, with
`--model` as given to `polar capture`, selects another. It takes no MCP servers.

Settings:
    api     chat (default), responses, anthropic or google
    json    false: its answer as text, instead of events
    args    further words for its command line
"""

from pathlib import PurePosixPath
from typing import Any, Literal

from polar.harnesses.base import Knowledge, Mark, Package, Setup, Wanted
from polar.harnesses.files import as_json
from polar.harnesses.settings import Common, read_settings

_APIS = {
    "chat": ("polar", "openai-completions", "/v1"),
    "responses": ("polar-responses", "openai-responses", "/v1"),
    "anthropic": ("polar-anthropic", "anthropic-messages", ""),
    "google": ("polar-google", "google-generative-ai", "/v1beta"),
}
_FOLDER = ".pi/agent"


class _Settings(Common, frozen=True, forbid_unknown_fields=True):
    api: Literal["chat", "responses", "anthropic", "google"] = "chat"


class Pi:
    name = "pi"
    executables = ("pi", "pi-coding-agent")
    default_model = "polar"
    knowledge = Knowledge(marks=(Mark("compaction", system="You are a context summarization assistant"),))
    package = Package("npm", "@earendil-works/pi-coding-agent", "0.87.1", "pi")
    skills = f"{_FOLDER}/skills"
    takes_mcp = False
    logs = (f"{_FOLDER}/sessions",)

    def setup(self, wanted: Wanted) -> Setup:
        settings = read_settings(self.name, wanted.settings, _Settings)
        # `reasoning` only says that the model may think: pi then asks for it, and sends it back.
        models = [{"id": wanted.model, "reasoning": True}]
        providers = {
            provider: {"baseUrl": wanted.gateway_url + path, "api": api, "apiKey": "$POLAR_API_KEY", "models": models}
            for provider, api, path in _APIS.values()
        }
        chosen = {
            "defaultProvider": _APIS[settings.api][0],
            "defaultModel": wanted.model,
            "defaultProjectTrust": "always",
            "enableInstallTelemetry": False,
            "enableAnalytics": False,
        }
        return Setup(
            files={
                f"{_FOLDER}/models.json": as_json({"providers": providers}),
                f"{_FOLDER}/settings.json": as_json(chosen),
            },
            env={
                "PI_CODING_AGENT_DIR": str(PurePosixPath(wanted.home, _FOLDER)),
                "PI_OFFLINE": "1",
                "PI_TELEMETRY": "0",
                "POLAR_API_KEY": wanted.key,
            },
        )

    def command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, _Settings)
        events = ["--mode", "json"] if chosen.json else []
        # A word that begins with @ is a file to it, wherever it stands.
        said = f"\n{instruction}" if instruction.startswith("@") else instruction
        return ["pi", *events, *chosen.args, "-p", "--", said]
