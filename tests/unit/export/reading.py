"""Each format of traces, read back into what a trace says. Written from the trainers' side: where a trainer finds the
tokens, what it trains, and which log-probability it takes for that."""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import json

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
}


def lines(data: bytes) -> list[Any]:
    return [json.decode(line) for line in data.splitlines()]


def read(name: str, data: bytes) -> list[ExportedTrace]:
    return [found for line in lines(data) for found in READERS[name](line)]
