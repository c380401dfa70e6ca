"""Ends with 0 if words.sh counts right in texts that the agent has not seen."""

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

TEXTS = [
    ("Red red RED green Green blue.\n", 2),
    ("b a c b-a c'a 12a34 a_b\n\n\nb", 3),
    ("one two two three three three four four four four\n" * 5, 10),
    ("to be, or not to be: that is the question\n", 4),
    ("...\n123 456\n", 5),
]


def expected(text, most):
    counts = Counter(re.findall("[a-z]+", text.lower()))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [f"{count} {word}" for word, count in ranked[:most]]


with contextlib.suppress(ImportError):
    import ctypes

    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody reads or writes this process's memory
shutil.rmtree(Path(__file__).parent)
for text, most in TEXTS:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a text.txt"
        file.write_text(text)
        ran = subprocess.run(["sh", "words.sh", file, str(most)], capture_output=True, text=True, timeout=20)
    printed = [line.strip() for line in ran.stdout.splitlines()]
    if ran.returncode != 0 or printed != expected(text, most):
        sys.exit(f"words.sh prints {printed} for {text!r} {most}: {ran.stderr}")
