"""codex (npm @openai/codex): `codex exec "..."`. It speaks Responses.

Outside a Git repository it insists on `--skip-git-repo-check`, which no setting replaces.
"""

import json
from pathlib import Path

from polar.harnesses.base import Knowledge, Mark
from polar.harnesses.files import write

# Nothing is asked and nothing is boxed in: whoever runs the harness decides where it runs. Web search, a tool that the
# provider would run, is off: no engine has it.
_CONFIG = """\
model = {model}
model_provider = "polar"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.polar]
name = "Polar"
base_url = {base_url}
env_key = "POLAR_API_KEY"
wire_api = "responses"

[analytics]
enabled = false

[features]
plugins = false
apps = false
"""


class Codex:
    name = "codex"
    executables = ("codex",)
    default_model = "gpt-5-codex"
    knowledge = Knowledge(
        agents=("thread-id",),  # the session id is the same for all of them
        subagents=("x-codex-parent-thread-id", "x-openai-subagent"),
        marks=(
            Mark("compaction", header="x-codex-turn-metadata", value='"request_kind":"compaction"'),
            Mark("compaction", header="x-openai-subagent", value="compact"),
            Mark("compaction", last="CONTEXT CHECKPOINT COMPACTION"),
            Mark("auxiliary", header="x-openai-subagent", value="memory_consolidation"),
        ),
    )

    def configure(self, home: Path, gateway_url: str, key: str, model: str) -> dict[str, str]:
        folder = home / ".codex"
        # A JSON string is a TOML string, too.
        config = _CONFIG.format(model=json.dumps(model), base_url=json.dumps(f"{gateway_url}/v1"))
        write(folder / "config.toml", config)
        return {"CODEX_HOME": str(folder), "POLAR_API_KEY": key}

    def command(self, instruction: str) -> list[str]:
        return ["codex", "exec", "--skip-git-repo-check", instruction]
