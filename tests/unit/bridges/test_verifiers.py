"""Sessions as verifiers' nodes, and its environments; without verifiers."""

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from polar.bridges import bridge
from polar.bridges.rollouts import SessionGroup
from polar.bridges.verifiers import VerifiersClasses, build_info, build_nodes, plugin
from polar.records.trajectory import SessionPaths
from polar.testing.conversations import ConversationBuilder, make_session_item
from polar.testing.token_paths import make_path
from polar.types import Text, ToolCall
from tests.unit.bridges.telling import result


def branches(made: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The chains, each from its root."""
    chains: list[list[dict[str, Any]]] = []
    for number, node in enumerate(made):
        if node["parent"] is None:
            chains.append([])
        else:
            assert node["parent"] == number - 1
        chains[-1].append(node)
    return chains


def test_each_trace_is_a_chain_of_its_own() -> None:
    paths = [
        make_path(0, [11, 12], [13, 14]),
        make_path(1, [11, 12, 13, 14, 15], [16]),
        make_path(2, [19], [18, 17, 16], role="subagent", trainable=2),
    ]
    one = make_session_item(SessionPaths("s", paths, 0.5), task_id="t")
    chains = branches(build_nodes(one, result(one)))
    recorded = one.trajectory.traces[0].logprobs
    assert recorded is not None
    assert [[node["token_ids"] for node in chain] for chain in chains] == [[[11, 12, 13, 14], [15, 16]], [[19, 18, 17]]]
    assert [node["mask"] for node in chains[0]] == [[False, False, True, True], [False, True]]
    assert [node["logprobs"] for node in chains[0]] == [recorded[:2].tolist(), recorded[3:].tolist()]
    usage = [(node["call"]["usage"]["prompt_tokens"], node["call"]["usage"]["completion_tokens"]) for node in chains[0]]
    assert usage == [(2, 2), (5, 1)]
    assert {node["sampled"] for chain in chains for node in chain} == {True}
    told = build_info(one)
    assert (told["reward"], len(told["traces"])) == (0.5, 2)
    assert told["traces"][0]["policy_versions"] == one.trajectory.traces[0].policy_versions.tolist()


def test_what_was_said_stands_before_the_tokens_that_said_it() -> None:
    talk = ConversationBuilder()
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List."}]
    talk.add_call(opening, [Text("So."), ToolCall("c1", "bash", '{"command": "ls"}')])
    one = talk.build_item()
    (chain,) = branches(build_nodes(one, result(one)))
    assert [node["message"]["role"] for node in chain] == ["system", "user", "assistant"]
    assert [node["sampled"] for node in chain] == [False, False, True]
    assert [len(node.get("token_ids", [])) for node in chain[:2]] == [0, 0]
    said = chain[-1]["message"]
    assert said["content"] == "So."
    assert [(call["name"], call["arguments"]) for call in said["tool_calls"]] == [("bash", '{"command": "ls"}')]
    assert sum(chain[-1]["mask"]) == 3


# The plug-in, by the contract of verifiers' classes


class Of:
    """A class of verifiers' that takes others in brackets."""

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class HarnessError(Exception):
    pass


class Rollouts:
    """Of a service that is played: all sessions are left out for a reason, if there is one."""

    reason: str | None = "harness_error"
    made: ClassVar[list["Rollouts"]] = []

    def __init__(self, _: Any) -> None:
        self.made.append(self)
        self.closed = False
        self.asked: list[str] = []

    async def run_group(self, task: str, key: str, **_: Any) -> SessionGroup:
        assert not self.closed
        self.asked.append(task)
        left_out = {} if self.reason is None else {self.reason: 1}
        return SessionGroup(task, f"train/{key}/{task}", 1, [], [], Counter(left_out))

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> VerifiersClasses:
    names = ("Task", "TaskData", "State", "TaskConfig", "Trace", "Taskset", "TasksetConfig", "EnvConfig", "Env")
    vf: Any = SimpleNamespace(**dict.fromkeys((*names, "Harness", "HarnessConfig", "SubprocessConfig"), Of))
    vf.AgentConfig = lambda **_: None
    vf.reward = lambda method: method
    vf.HarnessError = HarnessError
    vf.MessageNode = vf.ModelCall = Of
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(v1=vf))
    for name in ("", ".graph", ".trace"):
        monkeypatch.setitem(sys.modules, f"verifiers.v1{name}", vf)
    monkeypatch.setattr(bridge, "RolloutClient", Rollouts)
    monkeypatch.setattr(Rollouts, "made", [])
    return plugin({"name": "first", "tasks": ["tasks.jsonl"]})


class Agents:
    """Those of an episode: the one runs the harness."""

    def __init__(self, harness: Any) -> None:
        self.agent = self
        self.harness = harness

    async def run(self, task: str) -> None:
        ctx = SimpleNamespace(sampling=SimpleNamespace(temperature=1.0, top_p=None, max_tokens=None))
        await self.harness.launch(ctx, SimpleNamespace(id="e"), None, "", "", None, SimpleNamespace(id=task))


async def test_each_environment_has_a_client_of_its_own(plugged: VerifiersClasses) -> None:
    """One that stops leaves the others theirs."""
    first, second = plugged.env(), plugged.env()
    agents: Any = Agents(plugged.harness())
    await first.start()
    await second.start()
    own, other = Rollouts.made
    with pytest.raises(HarnessError, match="harness_error"):
        await first.run("a", agents)
    await first.stop()
    await first.stop()  # also where it did not start
    assert (own.closed, other.closed) == (True, False)
    with pytest.raises(HarnessError, match="harness_error"):
        await second.run("b", agents)
    await second.stop()
    assert (own.asked, other.asked, other.closed) == (["a"], ["b"], True)


async def test_a_task_without_results_is_a_failed_rollout(
    plugged: VerifiersClasses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rollouts, "reason", None)
    env = plugged.env()
    await env.start()
    with pytest.raises(HarnessError, match="no_results"):
        await env.run("a", Agents(plugged.harness()))


async def test_the_harness_says_that_it_needs_its_environment(plugged: VerifiersClasses) -> None:
    with pytest.raises(HarnessError, match="Polar's environment"):
        await Agents(plugged.harness()).run("a")
