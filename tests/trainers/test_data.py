"""Data without a trainer, read by `datasets` and TRL themselves."""

import json
import subprocess
from pathlib import Path

import pytest

from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.export.base import Exporter, SessionItem
from polar.export.huggingface import HuggingFaceExporter
from polar.export.preference import PreferenceExporter
from polar.export.sft_tokens import SftTokensExporter
from polar.testing.conversations import export_items
from tests.unit.export.test_data_formats import answer
from tests.unit.export.test_messages import two_turns
from tests.unit.train import tiny

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "trainers" / "venv" / "bin" / "python"


def written(exporter: Exporter, items: list[SessionItem], path: Path) -> list[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(export_items(exporter, items))
    return [] if exporter.is_binary else path.read_bytes().splitlines()


def test_datasets_and_trl_take_what_is_exported(tmp_path: Path) -> None:
    good, bad = two_turns().build_item(1.0, task_id="t"), answer("bad", "I don't know.").build_item(0.0, task_id="t")
    card = HuggingFaceExporter()
    written(card, [good], tmp_path / "set" / card.file_name)
    (tmp_path / "set" / "README.md").write_text(card.extra_files["README.md"])
    rows = [
        json.loads(line)
        for line in written(SftTokensExporter(str(TOKENIZER_FOLDER)), [good], tmp_path / "tokens.jsonl")
    ]
    assert len(written(PreferenceExporter(), [good, bad], tmp_path / "pairs.jsonl")) == 1
    tiny.folder(tmp_path / "model")
    done = subprocess.run(
        [str(PYTHON), str(Path(__file__).with_name("data_formats.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        env={"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert "There is a.txt." in told["rendered"]
    assert sorted(told["seen"]) == sorted([row["input_ids"], row["labels"]] for row in rows)
    assert (told["rows"], told["pairs"], told["dpo_steps"]) == (1, 1, 1)
    assert told["changed"]
