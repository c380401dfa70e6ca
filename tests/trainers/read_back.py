"""Reads an export with the trainer's own code, and compares it with what the traces say.

    python read_back.py TRAINER EXPORT EXPECTED

Runs in the trainers' environment (`make test-trainers`), with Polar's sources on the path for the loaders beside the
exporters. EXPECTED is JSON: a list of traces, each with prompt_ids, response_ids, loss_mask, logprobs and reward.
"""

import json
import sys
import typing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

Traces = list[dict[str, Any]]

TOKENIZER = Path(__file__).parents[2] / "src" / "polar" / "engines" / "scripted" / "tokenizer"


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def same(found: Any, expected: Any) -> None:
    """Ids and masks equal, floats equal as float32."""
    left, right = np.asarray(found), np.asarray(expected)
    if right.dtype.kind == "f":
        left, right = left.astype(np.float32), right.astype(np.float32)
    assert left.shape == right.shape, (left.shape, right.shape)
    assert np.array_equal(left, right), (left, right)


def whole(trace: dict[str, Any], name: str) -> list[Any]:
    return [0] * len(trace["prompt_ids"]) + trace[name]


def tokens(trace: dict[str, Any]) -> list[int]:
    return trace["prompt_ids"] + trace["response_ids"]


def verl(file: Path, traces: Traces) -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    from polar.export.verl import to_data_proto

    rows = lines(file)
    for row, trace in zip(rows, traces, strict=True):
        read = AgentLoopOutput(**row).as_dict()
        same(read["prompts"], trace["prompt_ids"])
        same(read["responses"], trace["response_ids"])
        same(read["response_mask"], trace["loss_mask"])
        same(read["rollout_log_probs"], trace["logprobs"])
        same(read["rm_scores"][-1], trace["reward"])
        assert read["extra_fields"]["session_id"]
    batch = to_data_proto(rows, pad_token_id=0)
    batch.check_consistency()
    size = batch.batch["prompts"].shape[1]
    for index, trace in enumerate(traces):
        attended = batch.batch["attention_mask"][index].bool()
        same(batch.batch["input_ids"][index][attended], tokens(trace))
        same(batch.batch["position_ids"][index][attended], list(range(len(tokens(trace)))))
        mask = batch.batch["response_mask"][index]
        same(mask[attended[size:]], trace["loss_mask"])
        same(batch.batch["rollout_log_probs"][index][: len(trace["logprobs"])], trace["logprobs"])
        same(batch.batch["rm_scores"][index].sum(), trace["reward"])


def trl(file: Path, traces: Traces) -> None:
    """A real GRPOTrainer, with a model of a few weights, takes the rows as its rollouts."""
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from polar.export.trl import to_rollout_columns

    rows = lines(file)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.eos_token = tokenizer.eos_token or tokenizer.pad_token
    shape = Qwen2Config(
        vocab_size=max(len(tokenizer), 1 + max(max(tokens(trace)) for trace in traces)),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    trainer = GRPOTrainer(
        model=Qwen2ForCausalLM(shape),
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(file.parent / "trl"),
            per_device_train_batch_size=len(rows),
            num_generations=len(rows),
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": "go"}]),
        rollout_func=lambda prompts, trainer: to_rollout_columns(rows),
        reward_funcs=lambda completions, reward, **kwargs: reward,
    )
    trainer.model.train()
    read = trainer._generate_and_score_completions([{"prompt": "go"} for _ in rows])
    for index, trace in enumerate(traces):
        count = len(trace["response_ids"])
        same(read["prompt_ids"][index][read["prompt_mask"][index].bool()], trace["prompt_ids"])
        same(read["completion_ids"][index][:count], trace["response_ids"])
        same(read["tool_mask"][index][:count] * read["completion_mask"][index][:count], trace["loss_mask"])
        same(read["sampling_per_token_logps"][index][:count], trace["logprobs"])
    rewards = np.array([trace["reward"] for trace in traces])
    assert np.allclose(trainer._metrics["train"]["reward"], rewards.mean())


def skyrl(file: Path, traces: Traces) -> None:
    if sys.version_info < (3, 12):  # where pydantic wants the other TypedDict, and SkyRL does not use it
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    from skyrl.train.utils.trainer_utils import validate_generator_output
    from transformers import AutoTokenizer

    from polar.export.skyrl import to_generator_output

    output = to_generator_output(lines(file))
    validate_generator_output(len(lines(file)), output, step_wise=True)
    for name, key in (
        ("prompt_token_ids", "prompt_ids"),
        ("response_ids", "response_ids"),
        ("loss_masks", "loss_mask"),
    ):
        assert output[name] == [trace[key] for trace in traces]
    for found, trace in zip(output["rollout_logprobs"], traces, strict=True):
        same(found, trace["logprobs"])
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    rewards = [[0.0] * (len(trace["response_ids"]) - 1) + [trace["reward"]] for trace in traces]
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.pad_token_id = tokenizer.pad_token_id or 0
    sequences, attention, *_ = convert_prompts_responses_to_batch_tensors(
        tokenizer,
        output["prompt_token_ids"],
        output["response_ids"],
        rewards,
        output["loss_masks"],
        output["rollout_logprobs"],
    )
    for sequence, mask, trace in zip(sequences, attention, traces, strict=True):
        same(sequence[mask.bool()], tokens(trace))


def openrlhf(file: Path, traces: Traces) -> None:
    for name in ("vllm", "vllm.inputs", "vllm.utils"):  # imported, for names that are not used here
        sys.modules.setdefault(name, MagicMock(__version__="0"))
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    generator = SamplesGenerator.__new__(SamplesGenerator)
    for row, trace in zip(lines(file), traces, strict=True):
        read = generator._process_response_into_experience(row, max_len=1 << 20)
        same(read.sequences[0], tokens(trace))
        same(read.action_mask[0], whole(trace, "loss_mask")[1:])
        same(read.rollout_log_probs[0], whole(trace, "logprobs")[1:])
        same(read.rewards, [trace["reward"]])


def areal(file: Path, traces: Traces) -> None:
    from areal.utils.data import concat_padded_tensors

    from polar.export.areal import to_tensors

    batch = concat_padded_tensors([to_tensors(row) for row in lines(file)])
    for index, trace in enumerate(traces):
        attended = batch["attention_mask"][index].bool()
        same(batch["input_ids"][index][attended], tokens(trace))
        same(batch["loss_mask"][index][attended], whole(trace, "loss_mask"))
        same(batch["logprobs"][index][attended], whole(trace, "logprobs"))
        same(batch["rewards"][index], trace["reward"])


def tinker(file: Path, traces: Traces) -> None:
    from polar.export.tinker import to_datum

    for row, trace in zip(lines(file), traces, strict=True):
        datum = to_datum(row)
        mask = np.array(whole(trace, "loss_mask")[1:], np.float32)
        same(datum.model_input.to_ints(), tokens(trace)[:-1])
        same(datum.loss_fn_inputs["target_tokens"].to_numpy(), tokens(trace)[1:])
        same(datum.loss_fn_inputs["logprobs"].to_numpy(), whole(trace, "logprobs")[1:])
        same(datum.loss_fn_inputs["advantages"].to_numpy(), mask * trace["reward"])
        same(to_datum(row, advantage=-2.0).loss_fn_inputs["advantages"].to_numpy(), mask * -2.0)


def verifiers(file: Path, traces: Traces) -> None:
    """prime-rl makes its samples of verifiers' branches: a branch of these nodes says the same."""
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Branch
    from verifiers.v1.types import AssistantMessage

    for row, trace in zip(lines(file), traces, strict=True):
        ids, mask, logprobs, *_ = row
        sampled = [value for value, trains in zip(logprobs, mask, strict=True) if trains]
        node = MessageNode(
            message=AssistantMessage(content=""), sampled=True, token_ids=ids, mask=mask, logprobs=sampled
        )
        branch = Branch(index=row[15], nodes=[node])
        same(branch.token_ids, tokens(trace))
        same(branch.sampled_mask, [bool(bit) for bit in whole(trace, "loss_mask")])
        same(branch.logprobs, [float(value) for value in whole(trace, "logprobs")])


def datasets(file: Path, traces: Traces) -> None:
    from datasets import load_dataset

    rows = load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(file.parent / "datasets"))
    for row, trace in zip(rows, traces, strict=True):
        for name in ("prompt_ids", "response_ids", "loss_mask", "logprobs"):
            same(row[name], trace[name])
        assert row["reward"] == trace["reward"]


def atif(file: Path, traces: Traces) -> None:
    from atif import Trajectory

    for line in lines(file):
        read = Trajectory.model_validate(line)
        found = [step.metrics for step in read.steps if step.metrics is not None]
        first = found[0]
        trace = traces.pop(0)
        count = len(first.completion_token_ids)
        same(first.prompt_token_ids, trace["prompt_ids"])
        same(first.completion_token_ids, trace["response_ids"][:count])
        same(first.logprobs, trace["logprobs"][:count])
        assert read.extra is not None
        assert read.extra["reward"] == trace["reward"]


def sft(file: Path, traces: Traces) -> None:
    """TRL renders each conversation with the tokenizer's template."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl.data_utils import apply_chat_template, is_conversational

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    rows = load_dataset("json", data_files=str(file), split="train", cache_dir=str(file.parent / "datasets"))
    assert len(rows) == len(traces)
    for row in rows:
        example = {"messages": row["messages"], "tools": row["tools"]}
        assert is_conversational(example)
        text = apply_chat_template(example, tokenizer)["text"]
        assert row["messages"][-1]["content"] in text


def main() -> None:
    trainer, file, expected = sys.argv[1:]
    globals()[trainer](Path(file), json.loads(Path(expected).read_text()))


if __name__ == "__main__":
    main()
