"""TRL's and AReaL's prefix trees, timed. Run by an interpreter that has them, which need not have Polar:

    python tree_builders.py trl|areal FOLDER

The folder has the sequences of each shape as NAME.ids.npy (all of them, end to end) and NAME.lengths.npy. Each answer
is a line of JSON: the best of the rounds in CPU seconds, from tensors as their trainers hold them to a finished tree,
and how many tokens that tree has. Making the tensors is not counted, nor is what they do with the tree afterwards.
"""

import contextlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS = 3
ENOUGH_SECONDS = 5.0  # no further round after that

Build = Callable[[], int]
"""Makes the tree, and says how many tokens it has."""


def prepare_trl(sequences: list[Any]) -> Build:
    """Rows of its asynchronous GRPO trainer, without a limit on their length."""
    torch = import_module("torch")
    packing = import_module("trl.experimental.async_grpo.packing")
    samples = [
        {"input_ids": ids, "completion_mask": torch.ones(1, dtype=torch.int64), "group_id": 0}
        for ids in (torch.from_numpy(it.astype(np.int64)) for it in sequences)
    ]

    def build() -> int:
        row = packing.TreeRow()
        for sample in samples:
            row.add(sample)
        return len(row.tokens)

    return build


def prepare_areal(sequences: list[Any]) -> Build:
    """The tries of its tree attention, in one tree, from a padded batch."""
    torch = import_module("torch")
    tree = import_module("areal.models.tree_attn.tree")
    longest = max(map(len, sequences))
    ids = torch.zeros((len(sequences), longest), dtype=torch.int64)
    mask = torch.zeros((len(sequences), longest), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
        mask[row, : len(sequence)] = True
    batch = {"input_ids": ids, "attention_mask": mask}

    def build() -> int:
        _, counts = tree._greedy_build_tries(batch, sys.maxsize)
        return int(sum(counts))

    return build


def measure_build(build: Build) -> tuple[float, int]:
    best, spent, unique = float("inf"), 0.0, 0
    for _ in range(ROUNDS):
        started_at = time.process_time()
        unique = build()
        took = time.process_time() - started_at
        best, spent = min(best, took), spent + took
        if spent > ENOUGH_SECONDS:
            break
    return best, unique


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    prepare = {"trl": prepare_trl, "areal": prepare_areal}[name]
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries greet
        import_module("torch").set_num_threads(1)
        version = importlib.metadata.version(name)
        for lengths in sorted(folder.glob("*.lengths.npy")):
            shape = lengths.name.removesuffix(".lengths.npy")
            ids = np.load(folder / f"{shape}.ids.npy")
            sequences = np.split(ids, np.cumsum(np.load(lengths))[:-1])
            seconds, unique = measure_build(prepare(sequences))
            told = {"version": version, "shape": shape, "seconds": seconds, "unique": unique}
            answers.write(json.dumps(told) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
