"""Rows as verl saves them, in every way that it has.

    python save_verl.py batches ASKED FOUND

ASKED has `rows` (AgentLoopOutputs as dicts) and a `folder`; FOUND lists the files.
"""

import json
import sys
from pathlib import Path

import torch

from polar.export.verl import to_data_proto


def main() -> None:
    asked = json.loads(Path(sys.argv[2]).read_text())
    folder = Path(asked["folder"])
    batch = to_data_proto(asked["rows"], pad_token_id=0)
    files = {name: str(folder / name) for name in ("proto.pkl", "proto.pt", "tensors.pt", "consolidated.pt")}
    batch.save_to_disk(files["proto.pkl"])
    torch.save(batch, files["proto.pt"])
    torch.save(batch.batch, files["tensors.pt"])
    torch.save(batch.batch.contiguous().consolidate(), files["consolidated.pt"])
    Path(sys.argv[3]).write_text(json.dumps(list(files.values())))


if __name__ == "__main__":
    main()
