"""Sessions as verifiers' nodes, without verifiers."""

from typing import Any

from polar.bridges.verifiers import info, nodes
from polar.trajectory.types import Sampled
from polar.types import Text, ToolCall
from tests.unit.bridges.telling import result
from tests.unit.export.samples import Talk, item
from tests.unit.trajectory.samples import path


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
        path(0, [11, 12], [13, 14]),
        path(1, [11, 12, 13, 14, 15], [16]),
        path(2, [19], [18, 17, 16], role="subagent", trainable=2),
    ]
    one = item(Sampled("s", paths, 0.5), task_id="t")
    chains = branches(nodes(one, result(one)))
    recorded = one.trajectory.traces[0].logprobs
    assert recorded is not None
    assert [[node["token_ids"] for node in chain] for chain in chains] == [[[11, 12, 13, 14], [15, 16]], [[19, 18, 17]]]
    assert [node["mask"] for node in chains[0]] == [[False, False, True, True], [False, True]]
    assert [node["logprobs"] for node in chains[0]] == [recorded[:2].tolist(), recorded[3:].tolist()]
    usage = [(node["call"]["usage"]["prompt_tokens"], node["call"]["usage"]["completion_tokens"]) for node in chains[0]]
    assert usage == [(2, 2), (5, 1)]
    assert {node["sampled"] for chain in chains for node in chain} == {True}
    told = info(one)
    assert (told["reward"], len(told["traces"])) == (0.5, 2)
    assert told["traces"][0]["policy_versions"] == one.trajectory.traces[0].policy_versions.tolist()


def test_what_was_said_stands_before_the_tokens_that_said_it() -> None:
    talk = Talk()
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List."}]
    talk.call(opening, [Text("So."), ToolCall("c1", "bash", '{"command": "ls"}')])
    one = talk.item()
    (chain,) = branches(nodes(one, result(one)))
    assert [node["message"]["role"] for node in chain] == ["system", "user", "assistant"]
    assert [node["sampled"] for node in chain] == [False, False, True]
    assert [len(node.get("token_ids", [])) for node in chain[:2]] == [0, 0]
    said = chain[-1]["message"]
    assert said["content"] == "So."
    assert [(call["name"], call["arguments"]) for call in said["tool_calls"]] == [("bash", '{"command": "ls"}')]
    assert sum(chain[-1]["mask"]) == 3
