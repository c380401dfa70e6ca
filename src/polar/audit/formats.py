"""Trainers' dumps as rows: what slime (and Miles), verl and TRL write, or are given.

Lines of JSON, Parquet, torch's files. What has text only is refused: text does not say which tokens were trained.
"""

import io
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from polar.audit.rows import RawRow, RolloutRow, RowProblem, build_row
from polar.distribution import install_hint
from polar.errors import ConfigError

Record = Mapping[str, Any]
_ZIP_MAGIC, _PICKLE_MAGIC = b"PK", b"\x80"


def read(trainer: str, file: Path) -> list[RolloutRow]:
    """Raises ConfigError where a file is not one of the trainer's."""
    rows: list[RolloutRow] = []
    for record in _read_records(file):
        if not isinstance(record, Mapping):
            raise ConfigError(
                f"{file} is no dump of {trainer}: it holds a {type(record).__name__} where a row would be."
            )
        try:
            rows += [build_row(len(rows) + 1 + more, fields) for more, fields in enumerate(FORMATS[trainer](record))]
        except KeyError as error:
            raise ConfigError(_describe_missing_field(trainer, file, record, str(error.args[0]))) from error
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"Row {len(rows) + 1} of {file} can't be read: {error}.") from error
    if not rows:
        raise ConfigError(f"There are no rows in {file}.")
    return rows


def _describe_missing_field(trainer: str, file: Path, record: Record, field: str) -> str:
    has = ", ".join(list(map(str, record))[:8])
    if {"output", "completion", "response"} & set(record):
        return (
            f"{file} has the text of rollouts ({has}) and no {field}: text does not say which tokens were trained, nor "
            f"in which context, so nothing can be checked. {_DUMP_ADVICE[trainer]}"
        )
    return f"{file} is no dump of {trainer}: a row has no {field}, but {has}. {_DUMP_ADVICE[trainer]}"


_DUMP_ADVICE = {
    "slime": "slime writes tokens with --save-debug-rollout-data.",
    "verl": "Save the batch (`DataProto.save_to_disk`) or AgentLoopOutputs as JSON lines; trainer.rollout_data_dir has "
    "text only.",
    "trl": "Write what the rollout_func returns, a JSON line for each completion; log_completions has text only.",
}


# Files


def _read_records(file: Path) -> Iterator[Any]:
    """What a file consists of, one by one."""
    if _is_pickled(file):
        found = _load_pickled(file)
        if isinstance(found, Mapping) and isinstance(found.get("samples"), list):  # a dump of slime's
            found = found["samples"]
        yield from found if isinstance(found, list) else [found]
    elif file.suffix == ".parquet":
        yield from _read_parquet(file)
    else:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _parse_line(line, file, number)


def _parse_line(line: str, file: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"Line {number} of {file} is not JSON: {error}.") from error


def _read_parquet(file: Path) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(f"Reading Parquet needs pyarrow ({error}): {install_hint('arrow')}.") from error
    try:
        with ParquetFile(file) as opened:
            for batch in opened.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file} can't be read: {error}.") from error


# Formats: each gives the rows of one record, and raises KeyError with the name of a field that is missing


def read_slime(record: Record) -> Iterator[RawRow]:
    """A `Sample` as a dict."""
    ids, length = _to_list(record["tokens"]), int(record["response_length"])
    known = record.get("metadata") or {}
    edge = max(0, len(ids) - length)
    mask = _to_list(record.get("loss_mask"))
    problems = []
    if length > len(ids):
        problems.append(RowProblem("lengths", f"response_length is {length}, but there are {len(ids)} tokens"))
    if record.get("remove_sample"):
        mask = [0] * length
    yield RawRow(
        prompt=ids[:edge],
        response=ids[edge:],
        mask=mask,
        logprobs=_to_list(record.get("rollout_log_probs")),
        rollout=_first_value(record, "rollout_id", "session_id"),
        versions=known.get("policy_versions"),
        skip="images" if record.get("multimodal_train_inputs") else None,
        problems=problems,
    )


def read_verl(record: Record) -> Iterator[RawRow]:
    """An `AgentLoopOutput`, or a whole batch of tensors."""
    if "responses" in record:
        yield from _read_verl_batch(record)
        return
    known = record.get("extra_fields") or {}
    yield RawRow(
        prompt=record["prompt_ids"],
        response=record["response_ids"],
        mask=record["response_mask"],
        logprobs=record.get("response_logprobs"),
        rollout=_first_value(known, "session_id"),
        versions=known.get("policy_versions"),
        skip="images" if record.get("multi_modal_data") else None,
    )


def _read_verl_batch(record: Record) -> Iterator[RawRow]:
    """Prompts are padded on the left, responses on the right. `old_log_probs` are no help: the trainer computed them
    in the very context that is in question."""
    prompts, responses = _to_list(record["prompts"]), _to_list(record["responses"])
    attention = _to_list(record["attention_mask"])
    masks = _to_list(record["response_mask"])
    logprobs = _to_list(record.get("rollout_log_probs")) or [None] * len(responses)
    pictures = record.get("multi_modal_inputs")
    for index, (prompt, response, attended) in enumerate(zip(prompts, responses, attention, strict=True)):
        edge = len(prompt)
        real = [at for at, seen in enumerate(attended[edge:]) if seen]
        problems = []
        if padding := [at for at, trains in enumerate(masks[index]) if trains and not attended[edge + at]]:
            problems.append(RowProblem("padding_trained", f"{len(padding)} tokens of padding are trained", padding[0]))
        values = logprobs[index]
        yield RawRow(
            prompt=[token for token, seen in zip(prompt, attended, strict=False) if seen],
            response=[response[at] for at in real],
            mask=[masks[index][at] for at in real],
            logprobs=None if values is None else [values[at] for at in real],
            skip="images" if pictures is not None and pictures[index] else None,
            problems=problems,
        )


def read_trl(record: Record) -> Iterator[RawRow]:
    """One completion, or all of them as a dict of lists."""
    prompts = record["prompt_ids"]
    if prompts and isinstance(prompts[0], list):
        count = len(prompts)
        columns = {name: values for name, values in record.items() if isinstance(values, list) and len(values) == count}
        for index in range(count):
            yield from read_trl({name: values[index] for name, values in columns.items()})
        return
    yield RawRow(
        prompt=prompts,
        response=record["completion_ids"],
        mask=record.get("env_mask"),
        logprobs=record.get("logprobs"),
        rollout=_first_value(record, "session_id"),
        versions=record.get("policy_versions"),
    )


FORMATS: dict[str, Callable[[Record], Iterator[RawRow]]] = {"slime": read_slime, "verl": read_verl, "trl": read_trl}


def _to_list(values: Any) -> Any:
    """Tensors and arrays as lists, all else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def _first_value(record: Record, *names: str) -> str | None:
    return next((str(record[name]) for name in names if record.get(name) is not None), None)


# Files that torch or pickle wrote, read without running anything that stands in them. A pickle is a program: it may
# name any function and have it called. Here only names of data are known (tensors, numpy's arrays, and the containers
# of verl, which are read as plain dicts, without verl). A file with any other name is refused.


class _DataProto:
    """verl's batch: tensors (as bytes of torch's), other columns, facts."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _TensorDict:
    """The name of the class is all that a pickle needs."""


def _load_pickled(file: Path) -> Any:
    """Raises ConfigError: with what it may not hold, or because it is no such file."""
    data = file.read_bytes()
    try:
        found = _load_torch(data) if data.startswith(_ZIP_MAGIC) else _DataUnpickler(io.BytesIO(data)).load()
        if isinstance(found, _DataProto):
            batch, others, facts = found.state
            if not isinstance(batch, bytes):
                raise pickle.UnpicklingError("its tensors were written as numpy's bytes")
            found = {**_load_torch(batch), **others, "meta_info": facts}
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        told = next((line for line in reason if "GLOBAL" in line or "global" in line), reason[-1] if reason else "")
        raise ConfigError(
            f"{file} was not read: {told.strip().rstrip('.')[:200]}. Only plain data is read from pickles, as they can "
            f"run anything: write JSON lines instead, or save plain dicts, lists and tensors."
        ) from error
    return found


def _is_pickled(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2).startswith((_ZIP_MAGIC, _PICKLE_MAGIC))


def _numpy_globals() -> dict[str, Callable[..., Any]]:
    array: Any = np.zeros(1).__reduce__()[0]
    scalar: Any = np.float32(0).__reduce__()[0]
    names: dict[str, Callable[..., Any]] = {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names |= {f"{module}._reconstruct": array, f"{module}.scalar": scalar}
    kinds = (type(np.dtype(code)) for code in "?bBhHiIlLqQefdOU")
    return names | {f"numpy.dtypes.{kind.__name__}": kind for kind in kinds}


def _load_torch(data: bytes) -> Any:
    torch = _import_torch()
    known: Mapping[str, Callable[..., Any]] = _numpy_globals() | {
        "verl.protocol.DataProto": _DataProto,
        "tensordict._td.TensorDict": _TensorDict,
        "tensordict._reductions._make_td": _rebuild_tensor_dict,
        "tensordict._reductions._rebuild_tensordict_files_consolidated": _rebuild_consolidated,
    }
    with torch.serialization.safe_globals([(it, name) for name, it in known.items()]):
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _import_torch() -> Any:
    try:
        return import_module("torch")
    except ImportError as error:
        raise ConfigError(f"Reading this file needs torch ({error}): {install_hint('verify')}.") from error


def _rebuild_tensor_dict(kind: type, state: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    """A TensorDict as it is."""
    return dict(state["_tensordict"])


def _rebuild_consolidated(metadata: Mapping[str, Any], storage: Any) -> dict[str, Any]:
    """A TensorDict whose tensors are stretches of one array of bytes."""
    torch = _import_torch()
    tensors = {}
    for name, (dtype, shape, start, stop, _) in metadata["leaves"].items():
        kind = getattr(torch, dtype.removeprefix("torch."))
        values = storage[start:stop].view(kind)
        tensors[name] = values[: int(np.prod(shape))].view(*shape)
    return tensors


class _DataUnpickler(pickle.Unpickler):
    """What `DataProto.save_to_disk` writes."""

    def find_class(self, module: str, name: str) -> Any:
        known = _numpy_globals() | {"verl.protocol.DataProto": _DataProto}
        try:
            return known[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"it holds the global {module}.{name}") from None
