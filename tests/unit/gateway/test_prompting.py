"""What a gateway knows of a session's turns."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from polar.config import EngineSettings
from polar.gateway.prompt_renderer import PromptRenderer
from polar.gateway.session_registry import OpenSession
from polar.records.exchange import ContextMark, Exchange
from polar.rendering.continuation import TurnHistory
from tests.unit.store import samples

MARK = ContextMark("digest", 3, "turns", "opening")


class Store:
    def __init__(self, exchanges: list[Exchange]) -> None:
        self._exchanges = exchanges

    async def exchanges(self, _: str) -> AsyncIterator[Exchange]:
        for exchange in self._exchanges:
            yield exchange


def exchange(seq: int, **changes: Any) -> Exchange:
    made = samples.exchange("s", seq, [b'{"role":"user","content":"Hi"}'])
    return replace(made, **{"context_mark": MARK, **changes})


RENDERED = exchange(0)
BY_ENGINE = exchange(1, context_mark=None)
WITHOUT_IDS = exchange(2, context_mark=None, prompt_ids=None, sampled_ids=None, logprobs=None)
FAILED = exchange(3, sampled_ids=None, reply=None)


@pytest.mark.parametrize(
    "exchanges", [[RENDERED, BY_ENGINE, WITHOUT_IDS, FAILED], [WITHOUT_IDS, RENDERED], [BY_ENGINE], [WITHOUT_IDS]]
)
@pytest.mark.parametrize("rendered_before", [False, True])
async def test_a_session_knows_the_same_after_a_restart(exchanges: list[Exchange], rendered_before: bool) -> None:
    """Else a branch would have one reason before, and another one after it."""
    live, resumed = [OpenSession(samples.session("s"), next_seq) for next_seq in (0, len(exchanges))]
    store: Any = Store(exchanges)
    pools: Any = None
    prompting = PromptRenderer(EngineSettings(), pools, store)
    if rendered_before:
        live.history = TurnHistory()
    for recorded in exchanges:
        prompting.add_exchange(live, recorded, None)
    before, after = await prompting.load_history(live), await prompting.load_history(resumed)
    assert (before.turns, before.unmarked) == (after.turns, after.unmarked)
