"""polar verify --from: rollouts of a real service and engine, as trainers would dump them. Polar's own are in order;
calls that are merged by comparing prompts only are not, and it shows where."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from msgspec import Struct

from polar.audit.audit import audit
from polar.audit.formats import read
from polar.bridges.rollouts import RolloutClient, SessionGroup
from polar.bridges.settings import load_settings
from polar.cli.main import main
from polar.errors import ConfigError
from polar.export.base import SessionItem, TraceLines
from polar.export.slime import SlimeExporter
from polar.export.trl import TrlExporter
from polar.export.verl import VerlExporter
from polar.records.trajectory import Trace
from polar.rendering.tokenizer import Tokenizer
from polar.trajectory.teacher import Teacher
from tests.bridging import Served, serving

TOLERANCE = 1e-4


class Said(Struct):
    status: int
    out: str
    err: str


Verify = Callable[..., Said]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Verify:
    """The command, on files of the test's folder."""

    def call(*arguments: str) -> Said:
        capsys.readouterr()
        words = [str(tmp_path / word) if "." in word else word for word in arguments]
        with pytest.raises(SystemExit) as ended:
            main(["verify", *words])
        return Said(ended.value.code, *capsys.readouterr())  # type: ignore[arg-type]

    return call


async def sampled(
    folder: Path, tasks: Sequence[str], builder: str, samples: int = 4, **engine: Any
) -> tuple[Served, list[SessionItem]]:
    async with serving(folder, **engine) as it:
        wanted = load_settings(it.settings(builder=builder, samples=samples))
        async with RolloutClient(wanted) as rollouts:
            groups: list[SessionGroup] = await rollouts.run_groups(tasks, "a")
    return it, [item for group in groups for item in group.items]


def rows(exporter: TraceLines, items: Sequence[SessionItem]) -> list[dict[str, Any]]:
    return [json.loads(line) for item in items for line in exporter.feed(item).splitlines()]


def write(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if file.suffix == ".jsonl":
        file.write_text("\n".join(json.dumps(row) for row in rows))
    elif file.suffix == ".parquet":
        kept = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "session_id")
        pyarrow.parquet.write_table(pa.Table.from_pylist([{name: row[name] for name in kept} for row in rows]), file)
    else:
        torch.save({"rollout_id": 3, "samples": list(rows)}, file)
    return file


def batch(rows: Sequence[dict[str, Any]], file: Path) -> Path:
    """As verl has them in a DataProto: prompts padded on the left, responses on the right."""
    prompts, responses = (max(len(row[name]) for row in rows) for name in ("prompt_ids", "response_ids"))

    def left(values: list[Any]) -> list[Any]:
        return [0] * (prompts - len(values)) + values

    def right(values: list[Any]) -> list[Any]:
        return values + [0] * (responses - len(values))

    attention = [left([1] * len(row["prompt_ids"])) + right([1] * len(row["response_ids"])) for row in rows]
    tensors = {
        "prompts": torch.tensor([left(row["prompt_ids"]) for row in rows]),
        "responses": torch.tensor([right(row["response_ids"]) for row in rows]),
        "attention_mask": torch.tensor(attention),
        "response_mask": torch.tensor([right(row["response_mask"]) for row in rows]),
        "rollout_log_probs": torch.tensor([right(row["response_logprobs"]) for row in rows], dtype=torch.float32),
    }
    torch.save(tensors, file)
    return file


async def test_what_polar_made_is_in_order_in_every_format(tmp_path: Path, verify: Verify) -> None:
    it, items = await sampled(tmp_path, ["plain-0", "plain-1", "split-0"], "prefix_merging")
    trained = sum(int(trace.loss_mask.sum()) for item in items for trace in item.trajectory.traces)
    count = sum(len(item.trajectory.traces) for item in items)
    slime, verl, trl = (rows(exporter, items) for exporter in (SlimeExporter(), VerlExporter(), TrlExporter()))
    together = tmp_path / "together.jsonl"
    together.write_text(json.dumps({name: [row[name] for row in trl] for name in trl[0]}))
    files = [
        ("slime", write(tmp_path / "slime.jsonl", slime)),
        ("slime", write(tmp_path / "slime.pt", slime)),
        ("verl", write(tmp_path / "verl.jsonl", verl)),
        ("verl", batch(verl, tmp_path / "verl.pt")),
        ("trl", write(tmp_path / "trl.jsonl", trl)),
        ("trl", write(tmp_path / "trl.parquet", trl)),
        ("trl", together),
    ]
    teacher = Teacher.load(it.model)
    for trainer, file in files:
        report = audit(read(trainer, file), teacher, tolerance=TOLERANCE)
        assert report.failure_message is None, (file.name, report.failure_message)
        assert (len(report.rows), sum(row.compared for row in report.rows)) == (count, trained)
    done = verify("--from", "slime", "slime.pt", "--model", str(it.model))
    assert done.status == 0, done.err
    assert "No problems" in done.out


async def test_turns_that_were_merged_by_their_prompts(tmp_path: Path, verify: Verify) -> None:
    it, items = await sampled(tmp_path, ["plain-0", "plain-1"], "per_request", 16, continuation="off")
    end = Tokenizer.load(it.model).encode("<|im_end|>")[0]
    spliced, dump = [], []
    for item in items:
        first, second = sorted(item.trajectory.traces, key=lambda trace: len(trace.prompt_ids))
        if not begins(second.prompt_ids.tolist(), first.prompt_ids.tolist()):
            continue  # what was said changed the end of the prompt: nobody would have merged these
        merged, seen = prompt_only(first, second, end)
        dump.append(merged)
        spliced.append(seen != second.prompt_ids.tolist())
    assert any(spliced)  # of 32: about a third of what this model says is tokenised otherwise
    file = write(tmp_path / "dump.jsonl", dump)
    report = audit(read("slime", file), Teacher.load(it.model), tolerance=TOLERANCE)
    assert [row.verdict for row in report.rows] == ["splice" if wrong else "clean" for wrong in spliced]
    at = spliced.index(True)
    assert report.rows[at].problems[0].turn == 2
    done = verify("--from", "slime", "dump.jsonl", "--model", str(it.model))
    assert done.status == 1
    assert f"{sum(spliced)} of {len(dump)} rows are not in order" in done.err
    assert "splice" in done.out
    told = json.loads(verify("--json", "--from", "slime", "dump.jsonl", "--model", str(it.model)).out)
    assert (told["ok"], told["kinds"]) == (False, {"splice": sum(spliced)})
    assert [row["number"] for row in told["problems"]] == [at + 1 for at, wrong in enumerate(spliced) if wrong]


def begins(ids: list[int], other: list[int]) -> bool:
    return ids[: len(other)] == other


def prompt_only(first: Trace, second: Trace, end: int) -> tuple[dict[str, Any], list[int]]:
    """Two calls as one row: the sampled ids of the first stand where the second's prompt has its text. And what stands
    before the second turn then."""
    assert first.logprobs is not None
    assert second.logprobs is not None
    prompt, later = first.prompt_ids.tolist(), second.prompt_ids.tolist()
    said, beyond = first.response_ids.tolist(), later[len(prompt) :]
    between = beyond[beyond.index(end) + (said[-1] == end) :]
    row = {
        "tokens": [*prompt, *said, *between, *second.response_ids.tolist()],
        "response_length": len(said) + len(between) + len(second.response_ids),
        "loss_mask": [1] * len(said) + [0] * len(between) + [1] * len(second.response_ids),
        "rollout_log_probs": [*first.logprobs.tolist(), *[0.0] * len(between), *second.logprobs.tolist()],
        "status": "completed",
    }
    return row, [*prompt, *said, *between]


def test_files_that_can_not_be_checked(tmp_path: Path, verify: Verify) -> None:
    text = tmp_path / "1.jsonl"
    text.write_text(json.dumps({"input": "user: hi", "output": "hello", "score": 1.0, "step": 1}))
    with pytest.raises(ConfigError, match=r"has the text of rollouts.*rollout_data_dir has text only"):
        read("verl", text)
    other = tmp_path / "other.jsonl"
    other.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="no dump of slime: a row has no tokens, but a"):
        read("slime", other)
    other.write_text("{")
    with pytest.raises(ConfigError, match=r"Line 1 of .* is not JSON"):
        read("trl", other)
    for arguments, said in (
        (("--from", "trl"), "Name a file of trl's rollouts"),
        (("--from", "trl", "nowhere.jsonl"), "There is no file"),
    ):
        done = verify(*arguments)
        assert done.status == 1
        assert said in done.err
        assert len(done.err.splitlines()) == 1


class Harm:
    """What a file could have run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("harm",)


def test_pickles_run_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pickle

    saved, plain = tmp_path / "saved.pt", tmp_path / "plain.pkl"
    torch.save({"samples": [{"tokens": [1], "response_length": 1, "metadata": Harm()}]}, saved)
    plain.write_bytes(pickle.dumps([Harm()]))
    for file in (saved, plain):
        with pytest.raises(ConfigError, match="print"):
            read("slime", file)
    assert capsys.readouterr().out == ""


def test_without_a_model(tmp_path: Path, verify: Verify) -> None:
    """What needs none is checked, and it says what was not."""
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.5, -1.0], "env_mask": [1, 1]}
    write(tmp_path / "rows.jsonl", [row])
    done = verify("--from", "trl", "rows.jsonl")
    assert done.status == 0
    assert "without --model" in " ".join(done.out.split())
    write(tmp_path / "rows.jsonl", [row | {"logprobs": [-0.5, None]}])
    done = verify("--from", "trl", "rows.jsonl")
    assert done.status == 1
    assert "row 1, token 1: 1 of 2 log-probabilities are missing or not finite" in done.err
