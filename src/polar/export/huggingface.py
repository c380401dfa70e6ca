"""A folder that Hugging Face's `datasets` loads: `load_dataset("FOLDER", split="train")`.

It holds the conversations of the sft format as Parquet, with columns of fixed types: `messages`, and `tools` as JSON
text, since no two tools' schemas have the same shape. Arguments of calls are text, too. Chat templates and trainers
take both (TRL does).

Only accepted sessions: a reward above 0, or what `--min-reward` asks for.

Who divides: the trainer.

What is lost: what the sft format loses, and conversations with pictures.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from polar.export.base import ExportNeed, SessionItem
from polar.export.parquet import ParquetRows
from polar.export.sft import SftExporter

if TYPE_CHECKING:
    import pyarrow as pa

_DATASET_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
---
# Conversations of agents, recorded with Polar

| column | |
|---|---|
| `messages` | the conversation, as chat messages; thinking in `reasoning_content` |
| `tools` | what the model could call, as JSON text |
| `session_id`, `task_id`, `reward` | where it is from |
| `suspicious` | whether its agent is proven to have tampered with the grading |
| `role`, `agent_id` | whose conversation it is: main or subagent |
"""


class HuggingFaceExporter(ParquetRows):
    name: ClassVar[str] = "huggingface"
    needs: ClassVar[frozenset[ExportNeed]] = SftExporter.needs
    file_name: ClassVar[str] = "data/train-00000-of-00001.parquet"
    extra_files: ClassVar[dict[str, str]] = {"README.md": _DATASET_CARD}

    def __init__(self) -> None:
        super().__init__()
        self._sft = SftExporter()

    def make_rows(self, item: SessionItem) -> Iterator[dict[str, Any]]:
        for row in self._sft.build_lines(item):
            try:
                messages = [message | {"content": _join_text(message.get("content"))} for message in row["messages"]]
            except _PictureError:
                self.left_out["conversation with a picture"] += 1
                continue
            known = row["metadata"]
            yield {
                "messages": messages,
                "tools": msgspec.json.encode(row["tools"]).decode(),
                **{name: known[name] for name in ("session_id", "task_id", "reward", "suspicious", "role", "agent_id")},
            }
        self.left_out += self._sft.left_out
        self._sft.left_out.clear()

    def schema(self) -> "pa.Schema":
        import pyarrow as pa

        text = pa.string()
        function = pa.struct({"name": text, "arguments": text})
        call = pa.struct({"id": text, "type": text, "function": function})
        message = pa.struct(
            {
                "role": text,
                "content": text,
                "reasoning_content": text,
                "tool_calls": pa.list_(call),
                "tool_call_id": text,
                "name": text,
            }
        )
        return pa.schema(
            {
                "messages": pa.list_(message),
                "tools": text,
                "session_id": text,
                "task_id": text,
                "reward": pa.float64(),
                "suspicious": pa.bool_(),
                "role": text,
                "agent_id": text,
            }
        )

    def estimate_bytes(self, item: SessionItem, rows: list[dict[str, Any]]) -> int:  # noqa: ARG002
        return sum(len(row["tools"]) + sum(map(_count_json_bytes, row["messages"])) for row in rows)


class _PictureError(Exception):
    """Something that is no text."""


def _join_text(content: str | list[dict[str, Any]] | None) -> str | None:
    """One text of several, joined as prompts are (rendering/messages.py)."""
    if content is None or isinstance(content, str):
        return content
    if not all(part.get("type") == "text" for part in content):
        raise _PictureError
    return "\n".join(part["text"] for part in content)


def _count_json_bytes(message: dict[str, Any]) -> int:
    return len(msgspec.json.encode(message))
