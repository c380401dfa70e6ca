"""Real sampling: SmolLM2 at temperature 1, several turns a session, through every dialect.

Real models drift: part of what they write gives other ids when it is encoded again. Every session must still be one
trace, and its log-probabilities those that the model itself gives to exactly these tokens in exactly this context.
"""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from polar.config import Settings
from polar.records.exchange import Exchange
from polar.rendering.tokenizer import Tokenizer
from polar.service import Service
from polar.trajectory import session as sessions
from polar.trajectory.builders import prefix_merging
from tests.engines.conftest import COMPLETIONS, GENERATE, ROOT, Recorder, met
from tests.integration.clients import CLIENTS, GOOGLE_WARNS, Wish

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings(GOOGLE_WARNS)]

TOLERANCE = 1e-4
SESSIONS = 8
TURNS = 5
TALKS = (
    ("Tell me about the town where you grew up.", "What did it smell like there?"),
    ("Write a short poem with rare words in it.", "Now one in which nothing rhymes."),
    ("List odd names for a pet hedgehog.", "Spell each of them backwards."),
    ("Write a line of Python that uses a regular expression.", "Explain it character by character."),
)
"""What a session begins with, and what it is asked from then on."""


async def talk(service: Service, number: int) -> str:
    """One session of several turns. Some replies end by themselves, others at the limit, or at a stop string."""
    session, key = await service.sessions.create({"number": number})
    client = CLIENTS[number % len(CLIENTS)](service.gateway_url, key)
    opening, then = TALKS[number % len(TALKS)]
    try:
        history: list[Any] = [*client.user(f"{opening} ({number})")]
        for turn in range(TURNS):
            wish = Wish(max_tokens=(40, 90)[turn % 2], stop=[";"] if turn == 3 else None)
            answer = await client.ask(history, stream=turn % 2 == 0, wish=wish)
            history += [*answer.echo, *client.user(f"{then} ({turn})")]
    finally:
        await client.close()
    await service.sessions.end(session.session_id)
    return session.session_id


def drifted(exchanges: Sequence[Exchange]) -> int:
    """How many completions are other ids once their text is encoded again."""
    tokenizer = Tokenizer.load(ROOT / "model")
    sampled = [exchange.sampled_ids.tolist() for exchange in exchanges if exchange.sampled_ids is not None]
    return sum(tokenizer.encode(tokenizer.decode(ids)) != ids for ids in sampled)


def check_continued(exchanges: Sequence[Exchange]) -> None:
    """Each prompt begins with all of the one before it, and with what was sampled there."""
    assert len(exchanges) == TURNS
    for exchange in exchanges:
        assert (exchange.status, exchange.untrainable) == ("complete", None), exchange.error
        assert exchange.sampling.temperature == 1.0
        assert exchange.logprob_kind == "raw"
    for before, exchange in pairwise(exchanges):
        assert (exchange.continuation, exchange.branch_reason) == ("recorded", None)
        assert exchange.parent == before.exchange_id
        assert before.prompt_ids is not None
        assert before.sampled_ids is not None
        assert exchange.prompt_ids is not None
        context = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
        assert exchange.prompt_ids[: len(context)].tolist() == context


def verify(data: Path) -> dict[str, Any]:
    """`polar verify` with the model at hand."""
    polar = Path(sys.executable).with_name("polar")
    command = [str(polar), "verify", "--json", "--data", str(data), "--model", str(ROOT / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
async def test_sessions_verify_and_are_one_trace_each(recorder: Recorder, tmp_path: Path, route: str) -> None:
    if route == COMPLETIONS:
        recorder.missing.add(GENERATE)  # as without --enable-scale-out
    settings = Settings.model_validate(
        {
            "engine": {
                "kind": "vllm",
                "urls": [recorder.url],
                "tokenizer": str(ROOT / "model"),
                "sampling": {"temperature": 1.0},
            },
            "gateway": {"port": 0},
            "server": {"port": 0},
        }
    )
    exchanges: list[Exchange] = []
    async with Service(settings, tmp_path) as service:
        await met(service, recorder)
        for session_id in await asyncio.gather(*(talk(service, number) for number in range(SESSIONS))):
            of_session = [exchange async for exchange in service.store.read_exchanges(session_id)]
            check_continued(of_session)
            exchanges += of_session
            merged = prefix_merging(await sessions.load_session_paths(service.store, session_id))
            assert len(merged.traces) == 1
            assert not merged.excluded
    assert Counter(call.path for call in recorder.calls) == {route: SESSIONS * TURNS}
    assert drifted(exchanges) > 0
    found = await asyncio.to_thread(verify, tmp_path)
    assert found["sessions"] == found["traces"]["prefix_merging"] == SESSIONS
    assert found["trainable"] == found["model"]["tokens"] == sum(exchange.usage.completion for exchange in exchanges)
    assert found["model"]["largest"] <= TOLERANCE
    print(f"{route}: {len(exchanges)} completions, {drifted(exchanges)} drift, largest {found['model']['largest']:.3g}")
