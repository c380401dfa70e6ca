"""pi (npm @earendil-works/pi-coding-agent): `pi -p "..."`.

It speaks all four APIs. The default is Chat; `--provider polar-responses`, `polar-anthropic` or `polar-google`, with
`--model` as given to `polar capture`, selects another.
"""

from pathlib import Path

from polar.harnesses.base import Knowledge, Mark
from polar.harnesses.files import write_json

_APIS = {
    "polar": ("openai-completions", "/v1"),
    "polar-responses": ("openai-responses", "/v1"),
    "polar-anthropic": ("anthropic-messages", ""),
    "polar-google": ("google-generative-ai", "/v1beta"),
}


class Pi:
    name = "pi"
    executables = ("pi", "pi-coding-agent")
    default_model = "polar"
    knowledge = Knowledge(marks=(Mark("compaction", system="You are a context summarization assistant"),))

    def configure(self, home: Path, gateway_url: str, key: str, model: str) -> dict[str, str]:
        folder = home / ".pi" / "agent"
        # `reasoning` only says that the model may think: pi then asks for it, and sends it back.
        models = [{"id": model, "reasoning": True}]
        providers = {
            provider: {"baseUrl": gateway_url + path, "api": api, "apiKey": "$POLAR_API_KEY", "models": models}
            for provider, (api, path) in _APIS.items()
        }
        write_json(folder / "models.json", {"providers": providers})
        settings = {
            "defaultProvider": "polar",
            "defaultModel": model,
            "defaultProjectTrust": "always",
            "enableInstallTelemetry": False,
            "enableAnalytics": False,
        }
        write_json(folder / "settings.json", settings)
        return {
            "PI_CODING_AGENT_DIR": str(folder),
            "PI_OFFLINE": "1",
            "PI_TELEMETRY": "0",
            "POLAR_API_KEY": key,
        }

    def command(self, instruction: str) -> list[str]:
        return ["pi", "-p", instruction]
