"""`polar bench fidelity`: is what we train on what was sampled, with real harnesses?

    harness x mode x (whole | one reply dropped) -> recorded session -> each builder's data -> counts

The same recorded sessions go through a baseline that merges by comparing prompts (peers/prompt_merging.py) and through
our builders. Sessions in mode `engine` are what a gateway records that speaks chat with its engine: there every prompt
is re-tokenised text.
"""

import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct, field

from polar.bench import fidelity_counts as counts
from polar.bench.client import BenchError
from polar.bench.fidelity_counts import FidelityCounts
from polar.bench.fidelity_sessions import MODES, Agent, Mode, RecordedSession, make_engine, record
from polar.bench.peers import prompt_merging
from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.trajectory import builders
from polar.trajectory.session import read_session_paths

BASELINE = prompt_merging.NAME

Progress = Callable[[str, int, int], None]
"""What is done now, and how many of how many recordings are done."""


class SessionFidelity(Struct):
    """One recorded session under every builder."""

    harness: str
    mode: Mode
    dropped: bool
    calls: int
    agents: int  # whose turns train
    sampled: int  # tokens
    delivered: int
    counts: list[FidelityCounts]
    branches: dict[str, int]  # calls by the reason of their branch
    excluded: dict[str, int]  # tokens by reason


class FidelityReport(Struct):
    tokenizer: str | None
    turns: int
    measured: list[SessionFidelity] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # recordings that came to nothing, and why


async def run(
    agents: Sequence[Agent], *, turns: int, tokenizer: str | None, progress: Progress, modes: Sequence[Mode] = MODES
) -> FidelityReport:
    report = FidelityReport(tokenizer, turns)
    recordings = [(agent, drops, mode) for drops in (False, True) for agent in agents for mode in modes]
    model = tokenizer or str(TOKENIZER_FOLDER)
    async with make_engine(turns, model, drops=False) as quick, make_engine(turns, model, drops=True) as slow:
        for number, (agent, drops, mode) in enumerate(recordings):
            what = f"{agent.name}, {mode}{', one reply dropped' if drops else ''}"
            progress(what, number, len(recordings))
            url = slow.url if drops else quick.url
            try:
                with tempfile.TemporaryDirectory(prefix="polar-bench-", ignore_cleanup_errors=True) as name:
                    recorded = await record(
                        agent, mode, url, drops=drops, turns=turns, tokenizer=model, folder=Path(name)
                    )
            except BenchError as error:
                report.failed[what] = str(error)
                continue
            report.measured.append(measure(recorded, agent.name, mode, dropped=drops))
            gc.collect()  # what a gateway with its tokenizer leaves behind is large, and full of cycles
    progress("done", len(recordings), len(recordings))
    return report


def measure(recorded: RecordedSession, harness: str, mode: Mode, *, dropped: bool) -> SessionFidelity:
    exchanges = recorded.exchanges
    session = read_session_paths(recorded.session, exchanges)
    built = [
        prompt_merging.build(exchanges),
        counts.from_traces(builders.per_request(session)),
        counts.from_traces(builders.prefix_merging(session)),
        counts.from_tree(builders.prefix_tree([session])),
    ]
    excluded: Counter[str] = Counter()
    for path in session.paths:
        for reason in path.excluded:
            excluded[reason.reason] += reason.stop - reason.start
    return SessionFidelity(
        harness=harness,
        mode=mode,
        dropped=dropped,
        calls=len(exchanges),
        agents=len({path.agent_id for path in session.paths if path.num_trainable}),
        sampled=sum(len(path.sampled) for path in session.paths),
        delivered=sum(exchange.delivered for exchange in exchanges),
        counts=[counts.count_tokens(one, exchanges) for one in built],
        branches=dict(Counter(it.branch_reason for it in exchanges if it.branch_reason is not None)),
        excluded=dict(excluded),
    )
