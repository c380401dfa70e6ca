"""aider (PyPI aider-chat): `aider --message "..."`. It speaks Chat without tools, through LiteLLM: the model writes its
edits and commands as text.

Its questions are answered with yes, but for one: commands that the model suggests are never run. Where the workspace is
a Git repository, it commits its edits, with a call for each message, and keeps an index in `.aider.tags.cache.v4`;
elsewhere it leaves an empty `.git`. It takes no MCP servers, and has neither events nor skills.

Settings:
    args    further words for its command line
"""

from pathlib import PurePosixPath
from typing import Any

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

_CONFIG_FOLDER = ".aider"
_QUIET = {
    "AIDER_YES_ALWAYS": "true",
    "AIDER_ANALYTICS_DISABLE": "true",
    "AIDER_CHECK_UPDATE": "false",
    "AIDER_SHOW_RELEASE_NOTES": "false",
    "AIDER_SHOW_MODEL_WARNINGS": "false",
    "AIDER_GITIGNORE": "false",
    "AIDER_DETECT_URLS": "false",  # else it fetches every address in the instruction
    "AIDER_DISABLE_PLAYWRIGHT": "true",
    "AIDER_PRETTY": "false",
    "AIDER_FANCY_INPUT": "false",
    # Where there is no repository it would make one. This lets `git init` fail, and nothing else.
    "GIT_DEFAULT_HASH": "none",
}


class Aider:
    name = "aider"
    executables = ("aider", "aider-chat")
    default_model = "polar"
    call_patterns = CallPatterns(
        role_patterns=(
            RolePattern("auxiliary", system_prompt="one-line Git commit messages based on the provided diffs"),
            RolePattern("compaction", system_prompt="*Briefly* summarize this partial conversation about programming."),
        )
    )
    package = Package("pypi", "aider-chat", "0.86.2", "aider", requires_python=">=3.10,<3.13")
    skills_folder = None
    supports_mcp = False
    log_paths = (_CONFIG_FOLDER,)

    def setup(self, request: SetupRequest) -> HarnessSetup:
        read_settings(self.name, request.settings, CommonSettings)
        folder = PurePosixPath(request.home, _CONFIG_FOLDER)
        # It fetches what it does not know of a model.
        known = {f"openai/{request.model}": {"litellm_provider": "openai", "mode": "chat"}}
        return HarnessSetup(
            files={f"{_CONFIG_FOLDER}/models.json": encode_json(known)},
            env={
                **_QUIET,
                "AIDER_MODEL_METADATA_FILE": str(folder / "models.json"),
                "AIDER_MODEL": f"openai/{request.model}",
                # Else they lie in the workspace.
                "AIDER_INPUT_HISTORY_FILE": str(folder / "input.history"),
                "AIDER_CHAT_HISTORY_FILE": str(folder / "chat.history.md"),
                "AIDER_LLM_HISTORY_FILE": str(folder / "llm.history"),
                "OPENAI_API_BASE": f"{request.gateway_url}/v1",
                "OPENAI_BASE_URL": f"{request.gateway_url}/v1",
                "OPENAI_API_KEY": request.key,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches prices
            },
        )

    def build_command(self, instruction: str, settings: dict[str, Any]) -> list[str]:
        chosen = read_settings(self.name, settings, CommonSettings)
        # These begin a command of aider's own.
        message = f"\n{instruction}" if instruction.startswith(("/", "!")) else instruction
        return ["aider", *chosen.args, f"--message={message}"]
