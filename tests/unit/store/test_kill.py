"""An exchange whose `append` has returned survives kill -9 of the process, whole."""

import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.unit.store.places import Place
from tests.unit.store.samples import conversation, fingerprint

LIVES = 10
ROOT = Path(__file__).parents[3]


def live_and_die(url: str, life: int) -> list[str]:
    """What the child had said when it was killed, in the middle of its work."""
    command = [sys.executable, "-m", "tests.unit.store.written_until_killed", url, str(life)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(random.randint(1, 60))]
        child.kill()
        said += child.stdout.readlines()
    assert child.returncode == -9
    return [line for line in said if line.endswith("\n")]


async def test_kill(place: Place) -> None:
    confirmed: defaultdict[str, int] = defaultdict(int)
    for life in range(LIVES):
        for line in live_and_die(place.url, life):
            session_id, seq = line.split()
            confirmed[session_id] = int(seq) + 1
    assert len(confirmed) >= LIVES
    store = place.open()
    for session_id, count in confirmed.items():
        found = [fingerprint(it) async for it in store.read_exchanges(session_id)]
        assert len(found) in (count, count + 1)  # one may have been written and not confirmed yet
        for number, (it, expected) in enumerate(zip(found, conversation(session_id, len(found)), strict=True)):
            expected.parent = f"x-{session_id}-{number - 1}" if number else None
            assert it == fingerprint(expected)
    await store.close()
