"""opencode (npm opencode-ai): `opencode run "..."`.

It speaks Chat; `-m polar-responses/MODEL` or `-m polar-anthropic/MODEL` selects another API. Its first call asks for a
title, without tools.
"""

from pathlib import Path

from polar.harnesses.base import Knowledge, Mark
from polar.harnesses.files import write_json

# The libraries that speak these APIs are part of opencode.
_APIS = {
    "polar": "@ai-sdk/openai-compatible",
    "polar-responses": "@ai-sdk/openai",
    "polar-anthropic": "@ai-sdk/anthropic",
}


class OpenCode:
    name = "opencode"
    executables = ("opencode", "opencode-ai")
    default_model = "polar"
    knowledge = Knowledge(
        agents=("x-session-id",),
        subagents=("x-parent-session-id",),
        marks=(
            Mark("auxiliary", system="You are a title generator"),
            Mark("compaction", last="anchored summary"),
        ),
    )

    def configure(self, home: Path, gateway_url: str, key: str, model: str) -> dict[str, str]:
        options = {"baseURL": f"{gateway_url}/v1", "apiKey": "{env:POLAR_API_KEY}"}
        models = {model: {"name": model, "tool_call": True, "reasoning": True}}
        config = {
            "model": f"polar/{model}",
            "small_model": f"polar/{model}",
            "provider": {name: {"npm": npm, "options": options, "models": models} for name, npm in _APIS.items()},
            "enabled_providers": list(_APIS),
            "permission": "allow",
            "autoupdate": False,
            "share": "disabled",
        }
        folder = home / ".config" / "opencode"
        path = folder / "opencode.json"
        write_json(path, config)
        # It fetches the library for plug-ins, which there are none of, unless its folder says that it is there.
        write_json(folder / "package-lock.json", {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}})
        (folder / "node_modules").mkdir()
        return {
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local" / "share"),
            "XDG_STATE_HOME": str(home / ".local" / "state"),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "OPENCODE_CONFIG": str(path),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "POLAR_API_KEY": key,
        }

    def command(self, instruction: str) -> list[str]:
        return ["opencode", "run", instruction]
