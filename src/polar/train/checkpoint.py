"""The files of a run: checkpoints to resume from, the journal, and the trained model.

    OUTPUT/run.json                    the run's id at the service, the same in every process
    OUTPUT/checkpoints/step-000012/    weights.safetensors, learner.pt, progress.json
    OUTPUT/journal.jsonl               the sessions of each step, up to the last checkpoint
    OUTPUT/model/                      the trained model, for any engine

A checkpoint holds weights, optimizer, random state and the progress of the rollouts. It is written atomically. Journal
entries after the last checkpoint were lost with the process and are truncated, so each session occurs once.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct, field

from polar.errors import ConfigError
from polar.train.rollouts import SettledGroups

if TYPE_CHECKING:
    from polar.train.learner import Learner

_WEIGHTS_FILE, _LEARNER_FILE, _PROGRESS_FILE = "weights.safetensors", "learner.pt", "progress.json"
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


class Progress(Struct):
    step: int = 0
    version: int = 0
    cursor: int = 0  # of the last collected group
    settled: SettledGroups = field(default_factory=SettledGroups)
    steps_of: dict[int, int] = field(default_factory=lambda: {0: 0})  # by version: the step whose weights it has


class JournalEntry(Struct):
    """One step in the journal."""

    step: int
    sessions: list[str]


class _RunIdentity(Struct):
    id: str
    order: str  # a digest of the seed and the tasks


class CheckpointStore:
    def __init__(self, output: Path, keep: int) -> None:
        self._output = output
        self._folder = output / "checkpoints"
        self._keep = keep
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"Can't keep anything in {output}: {error.strerror}. Name another output folder."
            ) from error

    def load_or_create_run_id(self, name: str, seed: int, tasks: Iterable[str]) -> str:
        """The run's id at the service; each output folder has its own. Progress is counted in the order of the tasks,
        so seed and tasks must not change. Raises ConfigError."""
        path = self._output / "run.json"
        order = hashlib.sha256(msgspec.json.encode([seed, *tasks])).hexdigest()
        if not path.exists():
            write_file_atomically(path, msgspec.json.encode(_RunIdentity(f"{name}-{secrets.token_hex(4)}", order)))
        identity = msgspec.json.decode(path.read_bytes(), type=_RunIdentity)
        if identity.order != order:
            raise ConfigError(
                f"The run in {self._output} has another seed, or other tasks: name another output folder."
            )
        return identity.id

    def find_latest(self) -> Path | None:
        return max(self._folder.glob("step-*"), default=None)

    def load(self, learner: "Learner") -> Progress:
        """Restores the latest checkpoint. Without one, progress starts at zero."""
        import torch
        from safetensors.torch import load_file

        folder = self.find_latest()
        if folder is None:
            return Progress()
        weights = load_file(folder / _WEIGHTS_FILE)
        state = torch.load(folder / _LEARNER_FILE, weights_only=True, map_location="cpu")
        learner.restore(weights, state)
        return msgspec.json.decode((folder / _PROGRESS_FILE).read_bytes(), type=Progress)

    def save(self, progress: Progress, learner: "Learner", entries: Iterable[JournalEntry]) -> None:
        """`entries` are those of the steps since the last checkpoint."""
        import torch
        from safetensors.torch import save_file

        with (self._output / "journal.jsonl").open("ab") as journal:
            for entry in entries:
                journal.write(msgspec.json.encode(entry) + b"\n")
        fsync_path(self._output / "journal.jsonl")
        with create_folder_atomically(self._folder / f"step-{progress.step:06}") as folder:
            weights = {name: tensor.cpu().contiguous() for name, tensor in learner.get_trained_weights().items()}
            save_file(weights, folder / _WEIGHTS_FILE)
            torch.save(learner.state_dict(), folder / _LEARNER_FILE)
            (folder / _PROGRESS_FILE).write_bytes(msgspec.json.encode(progress))
        for old in sorted(self._folder.glob("step-*"))[: -self._keep]:
            shutil.rmtree(old)

    def read_journal(self, step: int) -> list[JournalEntry]:
        """Reads the entries up to `step` and removes later ones."""
        return truncate_after_step(self._output / "journal.jsonl", step, JournalEntry)


T = TypeVar("T", bound=Struct)


class _StepLine(Struct):
    step: int


def truncate_after_step(path: Path, step: int, kind: type[T]) -> list[T]:
    """Reads the records up to `step` from a JSONL file and removes the others, including an incomplete last line."""
    kept_lines, records = [], []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        if line.endswith(b"\n") and msgspec.json.decode(line, type=_StepLine).step <= step:
            kept_lines.append(line)
            records.append(msgspec.json.decode(line, type=kind))
    if path.exists():
        write_file_atomically(path, b"".join(kept_lines))
    return records


# The trained model


def export_model(model: Any, base: Path, folder: Path) -> None:
    """Writes a model folder that any engine can serve: the weights with adapters merged in, and the other files of
    `base`."""
    from safetensors.torch import save_file

    from polar.weight_sync.merged_weights import get_merged_weights

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    tied = set(inner.all_tied_weights_keys)  # empty if the config ties nothing
    with create_folder_atomically(folder) as new_folder:
        for file in base.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES):
                shutil.copyfile(file, new_folder / file.name)
        weights = {
            name: tensor.cpu().contiguous() for name, tensor in get_merged_weights(model).items() if name not in tied
        }
        save_file(weights, new_folder / "model.safetensors", metadata={"format": "pt"})


# Atomic writes


@contextmanager
def create_folder_atomically(path: Path) -> Iterator[Path]:
    """Yields a temporary folder, which gets its final name once its contents are on disk."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    for file in sorted(unfinished.iterdir()):
        fsync_path(file)
    fsync_path(unfinished)
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    fsync_path(path.parent)


def write_file_atomically(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(data)
    fsync_path(unfinished)
    unfinished.rename(path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
