"""Ends with 0 if backup.sh copies what it should, in folders that the agent has not seen."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDERS = [
    {"one.txt": "1", "two.txt": "2", "three.md": "3"},
    {"a b.txt": "spaces", "  c.txt": "more", "d.txt.bak": "no"},
    {"-n.txt": "dash", "--help.txt": "dashes", "plain.txt": "p"},
    {"star*.txt": "*", "quote'.txt": "'", "txt": "no"},
    {"only.md": "no"},
    {},
]

with contextlib.suppress(ImportError):
    import ctypes

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody reads or writes this process's memory
shutil.rmtree(Path(__file__).parent)
for files in FOLDERS:
    for exists in (True, False):
        with tempfile.TemporaryDirectory(prefix="back up ") as folder:
            source, target = Path(folder) / "in here", Path(folder) / "out there"
            source.mkdir()
            for name, content in files.items():
                (source / name).write_text(content)
            if exists:
                target.mkdir()
            ran = subprocess.run(["sh", "backup.sh", source, target], capture_output=True, text=True, timeout=20)
            wanted = {name: content for name, content in files.items() if name.endswith(".txt")}
            copied = {path.name: path.read_text() for path in target.iterdir()} if target.is_dir() else None
            left = {path.name: path.read_text() for path in source.iterdir()}
        if ran.returncode != 0 or ran.stdout.strip() != str(len(wanted)) or copied != wanted or left != files:
            sys.exit(f"backup.sh of {sorted(files)} copies {copied} and prints {ran.stdout!r}: {ran.stderr}")
