"""Run by the trainers' own interpreter: what `datasets` and TRL make of exported data. Arguments: a folder that has
`set`, `tokens.jsonl`, `pairs.jsonl` and `model`. Prints what came of it, as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

folder = Path(sys.argv[1])
ARGUMENTS: dict[str, Any] = {
    "output_dir": str(folder / "out"),
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}


def lines(name: str) -> Any:
    return load_dataset("json", data_files=str(folder / name), split="train")


def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")


tokenizer = AutoTokenizer.from_pretrained(folder / "model")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

rows = load_dataset(str(folder / "set"), split="train")
rendered = tokenizer.apply_chat_template(rows[0]["messages"], tools=json.loads(rows[0]["tools"]), tokenize=False)

tokens = lines("tokens.jsonl")
seen: list[list[list[int]]] = []


class Sft(SFTTrainer):  # type: ignore[misc]
    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        for ids, labels, mask in zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True):
            seen.append([ids[mask == 1].tolist(), labels[mask == 1].tolist()])
        return super().compute_loss(model, inputs, *args, **kwargs)


sft = Sft(model(), SFTConfig(**ARGUMENTS, max_length=None), train_dataset=tokens, processing_class=tokenizer)
before = {name: weights.clone() for name, weights in sft.model.named_parameters()}
sft.train()
changed = any((weights != before[name]).any().item() for name, weights in sft.model.named_parameters())

pairs = lines("pairs.jsonl")
dpo = DPOTrainer(model(), args=DPOConfig(**ARGUMENTS, max_length=None), train_dataset=pairs, processing_class=tokenizer)
dpo.train()

print(
    json.dumps(
        {
            "rows": len(rows),
            "rendered": rendered,
            "changed": changed,
            "seen": seen,  # by the loss
            "pairs": len(pairs),
            "dpo_steps": dpo.state.global_step,
        }
    )
)
