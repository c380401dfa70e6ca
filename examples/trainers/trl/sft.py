"""Supervised fine-tuning with TRL on what `polar export --format sft` wrote; only the model's own words are learnt.

    python examples/trainers/trl/sft.py TRAIN.jsonl HELD_OUT.jsonl --model DIR [--steps N] [--output DIR] [--json]

Prints the loss of the held-out conversations, a mean over the assistant's tokens, before and after.

Whose words a token is follows from the model's own template, with no marks in it: an assistant's turn is what rendering
the conversation up to it adds to the prompt before it. Where a template shows a turn otherwise once others follow
(thinking that is left out), that turn is a row of its own, as the model would have seen it.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import SFTConfig, SFTTrainer

UNTRAINED = -100


class Renderer:
    def __init__(self, tokenizer: Any, longest: int) -> None:
        self._tokenizer = tokenizer
        self._longest = longest
        self.left_out = 0  # rows that are too long

    def rows(self, conversation: dict[str, Any]) -> Iterator[dict[str, list[int]]]:
        """Token ids and labels; each assistant's turn is trained in one of them."""
        messages = [_spelled(message) for message in conversation["messages"]]
        tools = conversation.get("tools") or None
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        while turns:
            text = self._text(messages[: turns[-1] + 1], tools)
            spans, others = [], []
            for turn in turns:
                before = self._text(messages[:turn], tools, add_generation_prompt=True)
                whole = self._text(messages[: turn + 1], tools)
                if not whole.startswith(before):
                    raise SystemExit("The model's template does not begin a reply as its prompt for one ends.")
                if text.startswith(whole):
                    spans.append((len(before), len(whole)))
                else:
                    others.append(turn)
            row = self._row(text, spans)
            if len(row["input_ids"]) <= self._longest:
                yield row
            else:
                self.left_out += 1
            turns = others

    def _row(self, text: str, spans: list[tuple[int, int]]) -> dict[str, list[int]]:
        read = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        labels = [
            token if any(first <= start and stop <= last for first, last in spans) else UNTRAINED
            for token, (start, stop) in zip(read["input_ids"], read["offset_mapping"], strict=True)
        ]
        return {"input_ids": read["input_ids"], "labels": labels}

    def _text(self, messages: list[dict[str, Any]], tools: list[Any] | None, **more: Any) -> str:
        return self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **more)


def _spelled(message: dict[str, Any]) -> dict[str, Any]:
    """Templates want arguments of calls as tables, and text as text."""
    spelled = dict(message)
    if not isinstance(spelled.get("content"), str):
        parts = spelled.get("content") or []
        spelled["content"] = "".join(part["text"] for part in parts if part.get("type") == "text")
    if spelled.get("tool_calls"):
        spelled["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"] or "{}")}}
            for call in spelled["tool_calls"]
        ]
    return spelled


def read(file: Path, renderer: Renderer) -> Dataset:
    rows = [row for line in file.read_text().splitlines() for row in renderer.rows(json.loads(line))]
    if not rows:
        raise SystemExit(
            f"{file} has no conversation to learn from: it is empty, or all of its rows are longer than --longest."
        )
    return Dataset.from_list(rows)


def loss_of(trainer: Any, rows: Dataset) -> float:
    """A mean over tokens that train, whatever the batches."""
    total = tokens = 0.0
    for row in rows:
        count = sum(label != UNTRAINED for label in row["labels"])
        total += trainer.evaluate(Dataset.from_list([row]))["eval_loss"] * count
        tokens += count
    return total / tokens


def train(wanted: argparse.Namespace, output: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(wanted.model)
    model = AutoModelForCausalLM.from_pretrained(wanted.model, dtype="float32")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    renderer = Renderer(tokenizer, wanted.longest or model.config.max_position_embeddings)
    learnt, held_out = read(wanted.train, renderer), read(wanted.held_out, renderer)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=SFTConfig(
            output_dir=str(output),
            max_steps=wanted.steps,
            learning_rate=wanted.rate,
            per_device_train_batch_size=wanted.batch,
            per_device_eval_batch_size=1,
            max_length=None,
            bf16=False,
            use_cpu=wanted.cpu,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            report_to=[],
            seed=wanted.seed,
        ),
        train_dataset=learnt,
        eval_dataset=held_out,
    )
    trainer.remove_callback(PrinterCallback)  # stdout is for the result
    before = loss_of(trainer, held_out)
    trainer.train()
    after = loss_of(trainer, held_out)
    if wanted.output is not None:
        trainer.save_model(str(wanted.output))
    return {
        "held_out_before": before,
        "held_out_after": after,
        "rows": len(learnt),
        "held_out_rows": len(held_out),
        "trained_tokens": sum(label != UNTRAINED for row in learnt for label in row["labels"]),
        "left_out": renderer.left_out,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tunes a model on exported conversations, with TRL.")
    parser.add_argument("train", type=Path, help="conversations, as polar export --format sft writes them")
    parser.add_argument("held_out", type=Path, help="others, for the loss before and after")
    parser.add_argument("--model", type=Path, required=True, help="its folder")
    parser.add_argument("--output", type=Path, help="folder for the trained model [it is not kept]")
    parser.add_argument("--steps", type=int, default=50, help="[50]")
    parser.add_argument("--batch", type=int, default=4, help="rows of a step [4]")
    parser.add_argument("--rate", type=float, default=2e-5, help="of learning [2e-5]")
    parser.add_argument("--longest", type=int, help="tokens of a row; longer ones are left out [the model's context]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    wanted = parser.parse_args()
    with TemporaryDirectory() as scratch:
        told = train(wanted, Path(scratch))
    if wanted.json:
        print(json.dumps(told))
    else:
        print(f"held-out loss {told['held_out_before']:.4f} before, {told['held_out_after']:.4f} after")
        print(f"{told['rows']} rows, {told['trained_tokens']} tokens trained; {told['left_out']} rows left out")
    if math.isnan(told["held_out_after"]):
        raise SystemExit("The loss is not a number.")


if __name__ == "__main__":
    main()
