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

from polar.harnesses.base import (
    CallPatterns,
    CommonSettings,
    HarnessSetup,
    Package,
    RolePattern,
    SetupRequest,
    encode_json,
    read_settings,
)

_APIS = {
    "chat": ("polar", "openai-completions", "/v1"),
    "responses": ("polar-responses", "openai-responses", "/v1"),
    "anthropic": ("polar-anthropic", "anthropic-messages", ""),
    "google": ("polar-google", "google-generative-ai", "/v1beta"),
}
_CONFIG_FOLDER = ".pi/agent"


class _Settings(CommonSettings, frozen=True, forbid_unknown_fields=True):
    api: Literal["chat", "responses", "anthropic", "google"] = "chat"


class Pi:
    name = "pi"
    executables = ("pi", "pi-coding-agent")
    default_model = "polar"
    call_patterns = CallPatterns(
        role_patterns=(RolePattern("compaction", system_prompt="You are a context summarization assistant"),)
    )
    package = Package("npm", "@earendil-works/pi-coding-agent", "0.87.1", "pi")
    skills_folder = f"{_CONFIG_FOLDER}/skills"
    supports_mcp = False
    log_paths = (f"{_CONFIG_FOLDER}/sessions",)

    def setup(self, request: SetupRequest) -> HarnessSetup:
        settings = read_settings(self.name, request.settings, _Settings)
        # `reasoning` only says that the model may think: pi then asks for it, and sends it back.
        models = [{"id": request.model, "reasoning": True}]
        providers = {
            provider: {"baseUrl": request.gateway_url + path, "api": api, "apiKey": "$POLAR_API_KEY", "models": models}
            for provider, api, path in _APIS.values()
        }
        chosen = {
            "defaultProvider": _APIS[settings.api][0],
            "defaultModel": request.model,
            "defaultProjectTrust": "always",
            "enableInstallTelemetry": False,
            "enableAnalytics": False,
        }
        return HarnessSetup(
            files={
                f"{_CONFIG_FOLDER}/models.json": encode_json({"providers": providers}),
                f"{_CONFIG_FOLDER}/settings.json": encode_json(chosen),
            },
            env={
                "PI_CODING_AGENT_DIR": str(PurePosixPath(request.home, _CONFIG_FOLDER)),
                "PI_OFFLINE": "1",
                "PI_TELEMETRY": "0",
                "POLAR_API_KEY": request.key,
            },
        )

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, _Settings)
        events = ["--mode", "json"] if chosen.json else []
        # A word that begins with @ is a file to it, wherever it stands.
        message = f"\n{instruction}" if instruction.startswith("@") else instruction
        return ["pi", *events, *chosen.args, "-p", "--", message]
