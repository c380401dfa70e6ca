"""Each format of traces, read back into what a trace says. Written from the trainers' side: where a trainer finds the
tokens, what it trains, and which log-probability it takes for that."""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import json

from polar.export.parquet import read as read_parquet
from polar.export.sft_tokens import IGNORE_INDEX
from polar.testing.exporters import ExportedTrace


def _padded(prompt: int, values: list[float] | None) -> list[float] | None:
    return None if values is None else [0.0] * prompt + values


def slime(row: Any) -> Iterator[ExportedTrace]:
    prompt = len(row["tokens"]) - row["response_length"]
    mask = [0] * prompt + row["loss_mask"]
    yield ExportedTrace.make(row["tokens"], mask, _padded(prompt, row["rollout_log_probs"]), row["reward"])


def verl(row: Any) -> Iterator[ExportedTrace]:
    prompt = len(row["prompt_ids"])
    mask, logprobs = [0] * prompt + row["response_mask"], _padded(prompt, row["response_logprobs"])
    yield ExportedTrace.make(row["prompt_ids"] + row["response_ids"], mask, logprobs, row["reward_score"])


def trl(row: Any) -> Iterator[ExportedTrace]:
    prompt = len(row["prompt_ids"])
    mask, logprobs = [0] * prompt + row["env_mask"], _padded(prompt, row["logprobs"])
    yield ExportedTrace.make(row["prompt_ids"] + row["completion_ids"], mask, logprobs, row["reward"])


def skyrl(row: Any) -> Iterator[ExportedTrace]:
    for index, prompt_ids in enumerate(row["prompt_token_ids"]):
        prompt = len(prompt_ids)
        recorded = row["rollout_logprobs"]
        logprobs = None if recorded is None else _padded(prompt, recorded[index])
        mask = [0] * prompt + row["loss_masks"][index]
        yield ExportedTrace.make(prompt_ids + row["response_ids"][index], mask, logprobs, row["rewards"][index])


def openrlhf(row: Any) -> Iterator[ExportedTrace]:
    mask = [0] * len(row["observation_tokens"])
    for start, stop in row["action_ranges"]:
        mask[start:stop] = [1] * (stop - start)
    yield ExportedTrace.make(row["observation_tokens"], mask, row["rollout_log_probs"], row["reward"])


def areal(row: Any) -> Iterator[ExportedTrace]:
    yield ExportedTrace.make(row["input_ids"][0], row["loss_mask"][0], row["logprobs"][0], row["rewards"][0])


def prime_rl(row: Any) -> Iterator[ExportedTrace]:
    tokens, mask, logprobs = row[:3]
    reward = None if row[12] is None else next(value for value, trains in zip(row[12], mask, strict=True) if trains)
    yield ExportedTrace.make(tokens, mask, logprobs, reward)


def tinker(row: Any) -> Iterator[ExportedTrace]:
    inputs = row["loss_fn_inputs"]
    ids, targets = row["model_input"]["chunks"][0]["tokens"], inputs["target_tokens"]["data"]
    assert ids[1:] == targets[:-1]
    mask = [0] * len(targets)
    for start, stop in row["polar"]["spans"]:
        first = row["polar"]["prompt_length"] - 1
        mask[first + start : first + stop] = [1] * (stop - start)
    reward = row["polar"]["reward"]
    assert ("advantages" in inputs) == (reward is not None)
    if reward is not None:
        assert inputs["advantages"]["data"] == [reward * trains for trains in mask]
    yield ExportedTrace.make([ids[0], *targets], [0, *mask], [0.0, *inputs["logprobs"]["data"]], reward)


def art(row: Any) -> Iterator[ExportedTrace]:
    mask = [flag & 2 for flag in row["flags"]]
    recorded = [0.0 if value == "NaN" else value for value in row["logprobs"]]
    known = any(value != "NaN" for value in row["logprobs"])
    yield ExportedTrace.make(row["tokens"], mask, recorded if known else None, row["polar"]["reward"])


def nemo_gym(row: Any) -> Iterator[ExportedTrace]:
    """As NeMo RL does: everything seen so far is the beginning of the next prompt."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for item in row["response"]["output"]:
        if "generation_token_ids" not in item:
            continue
        prompt, sampled = item["prompt_token_ids"], item["generation_token_ids"]
        assert prompt[: len(tokens)] == tokens
        new = len(prompt) - len(tokens)
        tokens = prompt + sampled
        mask += [0] * new + [1] * len(sampled)
        logprobs += [0.0] * new + item["generation_log_probs"]
    yield ExportedTrace.make(tokens, mask, logprobs, row["reward"])


def polar(row: Any) -> Iterator[ExportedTrace]:
    for trace in row["trajectory"]["traces"]:
        prompt = len(trace["prompt_ids"])
        mask, logprobs = [0] * prompt + trace["loss_mask"], _padded(prompt, trace["response_logprobs"])
        yield ExportedTrace.make(trace["prompt_ids"] + trace["response_ids"], mask, logprobs, trace["reward"])


def sft_tokens(row: Any) -> Iterator[ExportedTrace]:
    mask = [label != IGNORE_INDEX for label in row["labels"]]
    assert all(
        label == token for label, token, trains in zip(row["labels"], row["input_ids"], mask, strict=True) if trains
    )
    yield ExportedTrace.make(row["input_ids"], mask, None, row["metadata"]["reward"])


def tree(row: Any) -> Iterator[ExportedTrace]:
    """Each exchange that trains, with all that stands before it: a branch inside of what was sampled cuts it in
    terms."""
    rewards = {session["session_id"]: session["reward"] for session in row["sessions"]}
    nodes = {node["node"]: node for node in row["nodes"]}

    def context(number: int | None) -> list[int]:
        return [] if number is None else context(nodes[number]["parent"]) + nodes[number]["ids"]

    exchanges: dict[str, list[Any]] = {}
    for term in row["terms"]:
        exchanges.setdefault(term["exchange_id"], []).append(term)
    for terms in exchanges.values():
        terms.sort(key=lambda term: term["offset"])
        last = terms[-1]
        before = context(nodes[last["node"]]["parent"])
        tokens = before + nodes[last["node"]]["ids"][: last["stop"]]
        known = [term["logprobs"] for term in terms]
        sampled = sum(term["stop"] - term["start"] for term in terms)
        prompt = len(tokens) - sampled
        logprobs = None if None in known else [value for values in known for value in values]
        mask = [0] * prompt + [1] * sampled
        yield ExportedTrace.make(tokens, mask, _padded(prompt, logprobs), rewards[last["session_id"]])


def atif(row: Any) -> Iterator[ExportedTrace]:
    """Each call of a trajectory and of those inside it."""
    for trajectory in [row, *row.get("subagent_trajectories", [])]:
        for step in trajectory["steps"]:
            if (metrics := step.get("metrics")) is not None:
                prompt, sampled = metrics["prompt_token_ids"], metrics["completion_token_ids"]
                logprobs = _padded(len(prompt), metrics.get("logprobs"))
                mask = [0] * len(prompt) + [1] * len(sampled)
                yield ExportedTrace.make(prompt + sampled, mask, logprobs, row["extra"]["reward"])


def parquet(data: bytes) -> list[ExportedTrace]:
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        file.write(data)
        file.flush()
        return [ExportedTrace.from_trace(trace) for one in read_parquet(file.name) for trace in one.traces]


READERS: dict[str, Callable[[Any], Iterator[ExportedTrace]]] = {
    "polar": polar,
    "slime": slime,
    "verl": verl,
    "trl": trl,
    "skyrl": skyrl,
    "nemo-gym": nemo_gym,
    "prime-rl": prime_rl,
    "openrlhf": openrlhf,
    "areal": areal,
    "tinker": tinker,
    "art": art,
    "sft-tokens": sft_tokens,
    "tree": tree,
    "atif": atif,
}


def lines(data: bytes) -> list[Any]:
    return [json.decode(line) for line in data.splitlines()]


def read(name: str, data: bytes) -> list[ExportedTrace]:
    if name == "parquet":
        return parquet(data)
    return [found for line in lines(data) for found in READERS[name](line)]
