"""Known harnesses, and the environment that points any client library at the gateway."""

import os
from collections.abc import Mapping
from pathlib import PurePath

from polar import config
from polar.harnesses.base import CallPatterns, Harness
from polar.plugins import load, load_all


def build_base_urls(gateway_url: str) -> dict[str, str]:
    """What each provider's clients take as their base URL."""
    return {"openai": f"{gateway_url}/v1", "anthropic": gateway_url, "google": gateway_url}


def build_environment(gateway_url: str, key: str, model: str) -> dict[str, str]:
    """What the providers' own client libraries read. Works for most agents without further configuration."""
    exempt = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    no_proxy = ",".join(filter(None, (exempt, "127.0.0.1,localhost")))
    return {
        "OPENAI_BASE_URL": f"{gateway_url}/v1",
        "OPENAI_API_BASE": f"{gateway_url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": gateway_url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": model,
        "GOOGLE_GEMINI_BASE_URL": gateway_url,
        "GOOGLE_API_URL": gateway_url,
        "GEMINI_API_BASE": f"{gateway_url}/v1beta",
        "GEMINI_API_KEY": key,
        "GOOGLE_API_KEY": key,
        "POLAR_BASE_URL": gateway_url,
        "POLAR_API_KEY": key,
        # openai-agents uploads traces to OpenAI, with the session's key; a user's own choice stands.
        "OPENAI_AGENTS_DISABLE_TRACING": os.environ.get("OPENAI_AGENTS_DISABLE_TRACING", "1"),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


def filter_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What a harness gets of our own environment: neither settings of ours, which hold keys, nor what would lead it to
    an account of the user's."""
    return {
        name: value
        for name, value in variables.items()
        if name not in _ACCOUNT_VARIABLES and not (name.startswith(config.ENVIRONMENT_PREFIX) and "__" in name)
    }


_ACCOUNT_VARIABLES = frozenset(
    {
        "ANTHROPIC_AUTH_TOKEN",
        "CLAUDE_CODE_OAUTH_TOKEN",
        "CLAUDE_CODE_USE_BEDROCK",
        "CLAUDE_CODE_USE_FOUNDRY",
        "CLAUDE_CODE_USE_VERTEX",
        "GOOGLE_GENAI_USE_GCA",
        "GOOGLE_GENAI_USE_VERTEXAI",
    }
)


def load_harness(name: str) -> Harness:
    """By its name, or by that of its command."""
    harness: Harness = load("harnesses", to_preset_name(name))()
    return harness


def find_call_patterns(name: str | None) -> CallPatterns:
    """What is known of a harness's calls; for one that has no name, or an unknown one, what is known of any."""
    known = load_all("harnesses")
    named = None if name is None else known.get(to_preset_name(name))
    return CallPatterns.union(one.call_patterns for one in known.values()) if named is None else named.call_patterns


def to_preset_name(name: str) -> str:
    """The preset's own name, for that of its command, or one that other systems give it."""
    name = find_by_command([name]) or name.replace("-", "_")
    return _NAME_ALIASES.get(name, name)


_NAME_ALIASES = {"openhands_sdk": "openhands", "custom_shell": "shell"}


def find_by_command(argv: list[str]) -> str | None:
    """The harness that a command line runs, told by its executable (also behind npx, uvx and the like)."""
    words = [PurePath(word).name.split("@")[0] for word in argv[:3]]
    for name, harness in load_all("harnesses").items():
        executables = harness.executables
        if words[0] in executables or (words[0] in _LAUNCHERS and any(word in executables for word in words[1:])):
            return name
    return None


_LAUNCHERS = frozenset({"npx", "npm", "uvx", "pipx", "node", "env", "bunx"})
