import msgspec
import numpy as np
import pytest

from polar.records import wire
from polar.records.result import SessionResult
from polar.testing.token_paths import make_path, make_session_paths
from polar.trajectory.builders import per_request, prefix_merging, prefix_tree

SESSION = make_session_paths(
    make_path(0, [1, 2], [3, 4], trainable=1), make_path(1, [1, 2, 3, 5], [6], reward=0.5, agent_id="a", scale=0.7)
)


def test_a_trace_has_the_fields_that_trainers_read() -> None:
    (trace,) = msgspec.json.decode(msgspec.json.encode(wire.trajectory_to_dict(prefix_merging(SESSION))))["traces"]
    assert trace == {
        "prompt_ids": [1, 2],
        "response_ids": [3, 5, 6],
        "loss_mask": [1, 0, 1],
        "response_logprobs": [-1 / 64, 0.0, -1 - 1 / 64],
        "prompt_messages": [],
        "response_messages": [],
        "tools": None,
        "finish_reason": "finish 1",
        "reward": 1.0,
        "reason": None,
        "weight": 1.0,
        "policy_versions": [0, -1, 1],
        "exchange_ids": ["s-x0", "s-x1"],
        "role": "main",
        "agent_id": None,
        "branch_reason": "reason 0",
        "temperature": None,
        "metadata": {
            "session_id": "s",
            "spans": [
                {"exchange_id": "s-x0", "start": 0, "stop": 1, "offset": 0},
                {"exchange_id": "s-x1", "start": 2, "stop": 3, "offset": 0},
            ],
            "turn_rewards": {"s-x1": 0.5},
            "scales": {"s-x1": 0.7},
        },
    }


def test_a_trajectory_says_what_is_not_in_it() -> None:
    made = wire.trajectory_to_dict(per_request(SESSION), error="cut", status="ERROR")
    assert (made["status"], made["error"], len(made["traces"])) == ("ERROR", "cut", 2)
    assert made["metadata"] == {
        "session_id": "s",
        "builder": "per_request",
        "excluded": [{"exchange_id": "s-x0", "start": 1, "stop": 2, "reason": "undelivered"}],
        "tokens": {"computed": 8, "unique": 5, "trainable": 2},
        "reward": 1.0,
        "reason": None,
    }


def test_messages_are_those_of_each_trace() -> None:
    said = [wire.TraceMessages(prompt=["hello"], tools=[]), wire.TraceMessages(response=["bye"])]
    one, other = wire.trajectory_to_dict(per_request(SESSION), said)["traces"]
    assert (one["prompt_messages"], one["response_messages"], one["tools"]) == (["hello"], [], [])
    assert (other["prompt_messages"], other["response_messages"], other["tools"]) == ([], ["bye"], None)
    with pytest.raises(ValueError, match="shorter"):
        wire.trajectory_to_dict(per_request(SESSION), said[:1])


def test_a_tree() -> None:
    fork = make_session_paths(make_path(0, [1, 2], [3]), make_path(1, [1, 2], [4], logprobs=False, scale=0.7))
    made = msgspec.json.decode(msgspec.json.encode(wire.tree_to_dict(prefix_tree([fork]))))
    assert made["nodes"] == [
        {"node": 0, "parent": None, "depth": 0, "ids": [1, 2]},
        {"node": 1, "parent": 0, "depth": 2, "ids": [3]},
        {"node": 2, "parent": 0, "depth": 2, "ids": [4]},
    ]
    assert made["terms"][1] == {
        "session_id": "s",
        "exchange_id": "s-x1",
        "node": 2,
        "start": 0,
        "stop": 1,
        "offset": 0,
        "logprobs": None,
        "policy_versions": [1],
        "weight": 0.5,
        "scale": 0.7,
    }
    told = {"session_id": "s", "reward": 1.0, "reason": None, "turn_rewards": {}, "suspicious": False}
    assert made["sessions"] == [told]
    assert (made["excluded"], made["tokens"]) == ([], {"computed": 4, "unique": 4, "trainable": 2})


def test_log_probabilities_keep_their_bits() -> None:
    one = make_path(0, [1], [2, 3, 4])
    one.logprobs = np.array([-0.1, -1e-7, -12.345678], np.float32)
    (trace,) = msgspec.json.decode(msgspec.json.encode(wire.trajectory_to_dict(per_request(make_session_paths(one)))))[
        "traces"
    ]
    assert np.array_equal(np.array(trace["response_logprobs"], np.float32), one.logprobs)


def result(**changes: object) -> SessionResult:
    document = msgspec.json.decode(msgspec.json.encode(wire.trajectory_to_dict(prefix_merging(SESSION))))
    fields = {"session_id": "s", "task_id": "t", "status": "COMPLETED", "reward": 1.0, "trajectory": document | changes}
    return SessionResult.model_validate_json(msgspec.json.encode(fields))


def test_a_trajectory_comes_back_out_of_a_result() -> None:
    read = wire.trajectory_from_result(result())
    assert wire.trajectory_to_dict(read) == wire.trajectory_to_dict(prefix_merging(SESSION))
    kinds = {array.dtype for trace in read.traces for array in (trace.prompt_ids, trace.policy_versions)}
    assert kinds == {np.dtype(np.int32)}


def test_a_tree_comes_back() -> None:
    document = msgspec.json.decode(msgspec.json.encode(wire.tree_to_dict(prefix_tree([SESSION]))))
    read = wire.tree_from_dict(document)
    assert wire.tree_to_dict(read) == document
    assert {term.policy_versions.dtype for term in read.terms} == {np.dtype(np.int32)}


def test_a_result_has_typed_fields_and_keeps_unknown_ones() -> None:
    known = result(new_field=[1]).trajectory
    (trace,) = known.traces
    assert (trace.weight, trace.policy_versions, trace.exchange_ids, trace.role) == (
        1,
        [0, -1, 1],
        ["s-x0", "s-x1"],
        "main",
    )
    assert [span.exchange_id for span in trace.spans] == ["s-x0", "s-x1"]
    assert trace.turn_rewards == {"s-x1": 0.5}
    assert (known.tokens.trainable, [one.reason for one in known.excluded]) == (2, ["undelivered"])
    assert known.model_extra == {"new_field": [1]}


def test_a_trace_without_its_weight_is_not_read() -> None:
    received = result()
    trace = received.trajectory.traces[0].model_dump(exclude={"weight"})
    spoiled = result(traces=[trace])
    with pytest.raises(ValueError, match="A trace of session s has no weight"):
        wire.trajectory_from_result(spoiled)
