"""The contract of dialects, kept by those of Polar. Translations between them: tests/unit/dialects/test_pairs.py."""

from polar.plugins import load
from polar.testing import DialectContract


class TestOpenAIChat(DialectContract):
    plugin = load("dialects", "openai_chat")


class TestOpenAICompletions(DialectContract):
    plugin = load("dialects", "openai_completions")
    has_messages = False
    has_tools = False


class TestOpenAIResponses(DialectContract):
    plugin = load("dialects", "openai_responses")


class TestAnthropic(DialectContract):
    plugin = load("dialects", "anthropic")


class TestGoogle(DialectContract):
    plugin = load("dialects", "google")
