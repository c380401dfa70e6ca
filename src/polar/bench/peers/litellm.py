"""LiteLLM's proxy with one worker, from an environment of its own (it pins much of what others use)."""

import json
import subprocess
import sys
from pathlib import Path

from polar.errors import ConfigError

VERSION = "1.106.2"

ENVIRONMENT = {
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices
    "DISABLE_ADMIN_UI": "True",
}


def find_executable(environment: Path) -> Path | None:
    found = environment / "bin" / "litellm"
    return found if found.exists() else None


def install(environment: Path) -> None:
    """Makes the environment; takes a minute or two."""
    _run([sys.executable, "-m", "venv", str(environment)])
    _run([str(environment / "bin" / "python"), "-m", "pip", "install", "-q", f"litellm[proxy]=={VERSION}"])


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"Can't install LiteLLM ({reason}): name an environment that has it with --litellm DIR.")


def build_argv(command: Path, provider: str, engine_url: str, port: int, key: str, config: Path) -> list[str]:
    parameters = {"model": f"{provider}/bench", "api_base": f"{engine_url}/v1", "api_key": "none"}
    settings = {
        "model_list": [{"model_name": "bench", "litellm_params": parameters}],
        "litellm_settings": {"telemetry": False},
        "general_settings": {"master_key": key, "disable_spend_logs": True},  # it does not start without a key
    }
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    return [str(command), "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
