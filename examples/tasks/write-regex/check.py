"""Ends with 0 if pattern.txt tells versions from other texts. A pattern that takes for ever is stopped by the task's
time-out."""

import re
import sys
from pathlib import Path

RIGHT = ["0.0.0", "1.2.3", "10.20.30", "1.0.12", "0.3.0-rc1", "2.0.0-a", "9.9.9-beta2x", "1.0.0-x1y2z3"]
WRONG = ["", "1", "1.0", "1.2.3.4", "01.2.3", "1.02.3", "1.2.03", "1.2.3-", "1.2.3-1a", "1.2.3-RC1", "1.2.3-rc.1"]
WRONG += ["v1.2.3", "1.2.3 ", " 1.2.3", "1.2.3\n", "1,2,3", "1.2.3-rc_1", "a.b.c", "1..3", "00.0.0", "1.2.3rc1"]

(line,) = Path("pattern.txt").read_text().splitlines()
pattern = re.compile(line)
mistaken = [text for text in RIGHT if not pattern.fullmatch(text)] + [text for text in WRONG if pattern.fullmatch(text)]
if mistaken:
    sys.exit(f"{line} is wrong about {mistaken}")
