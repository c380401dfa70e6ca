"""The fixtures, as tests of an agent use them. Providers' own clients run against the same gateway."""

from pathlib import Path

import anthropic
import openai
import pytest

from polar.engines.scripted import ScriptedTurn
from polar.testing.fixtures import polar_gateway, scripted_engine
from polar.testing.gateway import LoopbackGateway, ScriptedEngineServer

__all__ = ["polar_gateway", "scripted_engine"]

SHELL: dict[str, object] = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def ask(gateway: LoopbackGateway, *messages: str) -> str:
    with openai.OpenAI(api_key=gateway.key, base_url=gateway.base_urls["openai"], max_retries=0) as client:
        turns = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(messages)]
        reply = client.chat.completions.create(model="any", messages=turns)  # type: ignore[call-overload]
    return str(reply.choices[0].message.content)


def test_turns_are_played_and_captured(scripted_engine: ScriptedEngineServer, polar_gateway: LoopbackGateway) -> None:
    scripted_engine.play("One.", "Two.")
    assert ask(polar_gateway, "Count.") == "One."
    assert ask(polar_gateway, "Count.", "One.", "Go on.") == "Two."
    first, second = polar_gateway.exchanges()
    assert second.parent == first.exchange_id
    (trace,) = polar_gateway.trajectory().traces
    assert trace.exchange_ids == [first.exchange_id, second.exchange_id]
    assert len(polar_gateway.trajectory("per_request").traces) == 2
    scripted_engine.play("Three.")
    assert ask(polar_gateway, "Count.") == "Three."


def test_tools_are_called(scripted_engine: ScriptedEngineServer, polar_gateway: LoopbackGateway) -> None:
    scripted_engine.play(ScriptedTurn(text="I look.", shell="ls"), "Done.")
    with anthropic.Anthropic(
        api_key=polar_gateway.key, base_url=polar_gateway.base_urls["anthropic"], max_retries=0
    ) as client:
        message = client.messages.create(
            model="any",
            max_tokens=100,
            messages=[{"role": "user", "content": "Look."}],
            tools=[{"name": "bash", "input_schema": SHELL}],
        )
    assert [block.type for block in message.content] == ["text", "tool_use"]


def test_an_ended_session_has_its_reward_and_no_key(polar_gateway: LoopbackGateway) -> None:
    ask(polar_gateway, "Hello.")
    polar_gateway.end(reward=0.5)
    assert polar_gateway.trajectory().reward == 0.5
    with pytest.raises(openai.AuthenticationError):
        ask(polar_gateway, "Hello.")


def test_without_pytest(tmp_path: Path) -> None:
    with LoopbackGateway.open(tmp_path, "Hello.", metadata={"model": "small"}) as gateway:
        assert gateway.environment()["OPENAI_API_KEY"] == gateway.key
        assert ask(gateway, "Greet me.") == "Hello."
    with LoopbackGateway.open(tmp_path, "Again.") as gateway:  # the folder is its store
        assert ask(gateway, "Greet me.") == "Again."
        assert len(gateway.exchanges()) == 1
