"""What `make bench-fidelity` counts, on tiny made-up exchanges, and a whole run with the built-in agent."""

import io

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.client import BenchmarkError
from benchmarks.fidelity import benchmark as fidelity
from benchmarks.fidelity import counts as fidelity_counts
from benchmarks.fidelity import prompt_merging
from benchmarks.fidelity import sessions as fidelity_sessions
from benchmarks.fidelity.counts import BuiltSession, FidelityCounts, TrainingSequence, count_tokens
from benchmarks.fidelity.sessions import RecordedSession
from polar.engines.scripted.sampler import expected_logprobs
from polar.records.exchange import Exchange, RawRequest, TokenIds, VersionSpan
from polar.records.session import Session
from polar.records.spans import ExcludedSpan, Span
from polar.trajectory.builders import prefix_merging
from polar.trajectory.session import read_session_paths
from polar.types import Reply, Text

END = 9  # of a turn
SYSTEM = [1, 2, 3]


def array(ids: list[int]) -> TokenIds:
    return np.array(ids, np.int32)


def exchange(seq: int, prompt: list[int], sampled: list[int], *, delivered: int | None = None) -> Exchange:
    return Exchange(
        exchange_id=f"x{seq}",
        session_id="s",
        seq=seq,
        dialect="openai_chat",
        params={},
        hints={},
        raw_request=RawRequest(
            {"model": msgspec.Raw(b'"m"')}, "messages", [msgspec.Raw(b'{"role":"user","content":"Hi"}')]
        ),
        status="complete" if delivered is None else "partial",
        started_at=float(seq),
        ended_at=seq + 0.5,
        reply=Reply(f"x{seq}", "m", 0, [Text("word")]),
        prompt_ids=array(prompt),
        sampled_ids=array(sampled),
        logprobs=expected_logprobs(0, array(prompt), array(sampled)),
        logprob_kind="raw",
        delivered=len(sampled) if delivered is None else delivered,
        versions=[VersionSpan(0, 0, len(sampled))],
        finish_reason="stop" if delivered is None else None,
    )


def recorded(exchanges: list[Exchange]) -> RecordedSession:
    """All of them are turns of one agent, whatever their messages are."""
    roles = {it.exchange_id: "main" for it in exchanges}
    return RecordedSession(Session("s", b"", 0.0, metadata={"roles": roles}), exchanges)


def counted(exchanges: list[Exchange]) -> dict[str, FidelityCounts]:
    measured = fidelity.measure(recorded(exchanges), "made up", "engine", dropped=False)
    return {counts.builder: counts for counts in measured.counts}


def own(counts: dict[str, FidelityCounts]) -> list[FidelityCounts]:
    return [counts[name] for name in ("per_request", "prefix_merging", "prefix_tree")]


def trained(first: Exchange, ids: list[int], spans: list[Span], excluded: list[ExcludedSpan]) -> FidelityCounts:
    """A sequence with the log-probabilities of one exchange, wherever its spans stand."""
    logprobs = np.zeros(len(ids), np.float32)
    assert first.logprobs is not None
    for span in spans:
        logprobs[span.start : span.stop] = first.logprobs[span.offset : span.offset + span.stop - span.start]
    return count_tokens(
        BuiltSession("made up", 1, len(ids), [TrainingSequence(array(ids), logprobs, spans)], excluded), [first]
    )


# The counts


def test_true_tokens_count_as_such() -> None:
    found = trained(exchange(0, SYSTEM, [5, 6, END]), [*SYSTEM, 5, 6, END], [Span("x0", 3, 6, 0)], [])
    assert (found.trained, found.wrong_context, found.wrong_logprob, found.lost) == (3, 0, 0, 0)
    assert found.unique == found.computed == 6


@pytest.mark.parametrize(
    ("ids", "start", "wrong"),
    [
        ([1, 7, 3, 5, 6, END], 3, 3),  # another context: all of it
        ([1, 2, 3, 5, 7, END], 3, 2),  # another token: it, and all behind it
        ([1, 2, 3, 4, 5, 6, END], 4, 3),  # a token too many before it
    ],
)
def test_a_token_in_another_context_is_counted(ids: list[int], start: int, wrong: int) -> None:
    found = trained(exchange(0, SYSTEM, [5, 6, END]), ids, [Span("x0", start, start + 3, 0)], [])
    assert found.wrong_context == found.wrong_logprob == wrong


def test_a_wrong_logprob_is_counted_where_the_context_is_right() -> None:
    one = exchange(0, SYSTEM, [5, 6, END])
    assert one.logprobs is not None
    one.logprobs[1] -= 1
    found = trained(one, [*SYSTEM, 5, 6, END], [Span("x0", 3, 6, 0)], [])
    assert (found.wrong_context, found.wrong_logprob) == (0, 1)


def test_delivered_tokens_are_lost_unless_trained_or_excluded() -> None:
    one = exchange(0, SYSTEM, [5, 6, 7, END])
    spans = [Span("x0", 3, 4, 0)]
    assert trained(one, [*SYSTEM, 5], spans, []).lost == 3
    assert trained(one, [*SYSTEM, 5], spans, [ExcludedSpan("x0", 1, 3, "undelivered")]).lost == 1
    one.delivered = 2
    assert trained(one, [*SYSTEM, 5], spans, []).lost == 1


def test_shared_prefixes_are_unique_once() -> None:
    counts = counted([exchange(0, SYSTEM, [5, END]), exchange(1, [*SYSTEM, 5, END, 4], [6, END])])
    assert [it.unique for it in own(counts)] == [8] * 3
    assert [it.computed for it in own(counts)] == [5 + 8, 8, 8]


# The baseline


def test_baseline_merges_what_really_extends() -> None:
    counts = counted([exchange(0, SYSTEM, [5, END]), exchange(1, [*SYSTEM, 5, END, 4], [6, END])])
    baseline = counts[prompt_merging.NAME]
    assert (baseline.traces, baseline.trained, baseline.wrong_context, baseline.lost) == (1, 4, 0, 0)


def test_baseline_puts_a_turn_behind_a_drifted_one_into_another_context() -> None:
    """[5, 6] was sampled; the next prompt has the same text as [7]."""
    counts = counted([exchange(0, SYSTEM, [5, 6, END]), exchange(1, [*SYSTEM, 7, END, 4], [8, END])])
    baseline = counts[prompt_merging.NAME]
    assert (baseline.traces, baseline.trained, baseline.lost) == (1, 5, 0)
    assert baseline.wrong_context == baseline.wrong_logprob == 2
    assert [it.wrong_context for it in own(counts)] == [0, 0, 0]
    assert counts["prefix_merging"].traces == 2


def test_baseline_loses_what_follows_a_reply_that_is_asked_for_again() -> None:
    again = [*SYSTEM, 5, END, 4]
    exchanges = [
        exchange(0, SYSTEM, [5, END]),
        exchange(1, again, [6, 6, 6], delivered=1),
        exchange(2, again, [7, END]),
        exchange(3, [*again, 7, END, 4], [8, END]),
    ]
    counts = counted(exchanges)
    baseline = counts[prompt_merging.NAME]
    assert baseline.lost == 4
    assert [(it.lost, it.wrong_context) for it in own(counts)] == [(0, 0)] * 3


def test_baseline_closes_a_turn_that_was_cut() -> None:
    """One that ended by itself taught it the end token; the cut one lacks it, and gets it as context."""
    cut = exchange(1, [*SYSTEM, 5, END, 4], [6, 6])
    cut.finish_reason = "length"
    built = prompt_merging.build(
        [exchange(0, SYSTEM, [5, END]), cut, exchange(2, [*SYSTEM, 5, END, 4, 6, 6, END, 4], [8])]
    )
    assert built.trained[0].ids.tolist() == [*SYSTEM, 5, END, 4, 6, 6, END, 4, 8]


def test_baseline_keeps_agents_apart() -> None:
    exchanges = [
        exchange(0, SYSTEM, [5, END]),
        exchange(1, [4, 4], [6, END]),
        exchange(2, [*SYSTEM, 5, END, 4], [7, END]),
        exchange(3, [4, 4, 6, END, 3], [8, END]),
    ]
    built = prompt_merging.build(exchanges)
    assert [[span.exchange_id for span in it.spans] for it in built.trained] == [["x0", "x2"], ["x1", "x3"]]


@settings(max_examples=20)
@given(st.data())
def test_any_session_is_true_under_our_builders(data: st.DataObject) -> None:
    """Prompts extend an earlier path, drop or change some of it, or repeat it. A token is right or it isn't, by both
    ways of looking, and ours always are."""
    ids = st.lists(st.integers(1, 8), min_size=1, max_size=4)
    exchanges = [exchange(0, data.draw(ids), [*data.draw(ids), END])]
    for seq in range(1, data.draw(st.integers(1, 6))):
        parent = data.draw(st.sampled_from(exchanges))
        assert parent.prompt_ids is not None
        assert parent.sampled_ids is not None
        path = [*parent.prompt_ids.tolist(), *parent.sampled_ids.tolist()]
        kept = data.draw(st.sampled_from([path, path[: len(parent.prompt_ids)], [*path[:-2], END]]))
        sampled = [*data.draw(ids), END]
        delivered = data.draw(st.none() | st.integers(0, len(sampled)))
        exchanges.append(exchange(seq, kept + data.draw(st.just([]) | ids), sampled, delivered=delivered))
    counts = counted(exchanges)
    for it in own(counts):
        assert it.wrong_context == it.wrong_logprob == it.lost == 0
    assert counts["prefix_tree"].computed == counts["prefix_tree"].unique
    baseline = counts[prompt_merging.NAME]
    assert baseline.wrong_context == baseline.wrong_logprob


# Recording


def test_a_harness_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert [agent.name for agent in fidelity_sessions.find_installed_agents()] == [fidelity_sessions.BUILT_IN]
    with pytest.raises(BenchmarkError, match="Not installed: claude_code"):
        fidelity_sessions.find_installed_agents(["claude"])


@pytest.mark.slow
async def test_a_run_with_the_built_in_agent() -> None:
    agents = fidelity_sessions.find_installed_agents([fidelity_sessions.BUILT_IN])
    steps: list[tuple[int, int]] = []

    def progress(_: str, done: int, total: int) -> None:
        steps.append((done, total))

    report = await fidelity.run(agents, turns=6, tokenizer=None, progress=progress, modes=("engine", "auto"))
    assert steps == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert not report.failed
    assert [(it.mode, it.dropped, it.calls) for it in report.measured] == [
        ("engine", False, 6),
        ("auto", False, 6),
        ("engine", True, 7),
        ("auto", True, 7),
    ]
    by_text, by_ids, dropped, _ = report.measured
    assert by_text.counts[0].wrong_context > by_text.counts[0].trained / 2
    assert by_ids.counts[0].wrong_context == 0
    assert dropped.counts[0].lost > dropped.delivered / 2
    assert all(promise.reached for promise in fidelity.list_promises(report))
    assert set(msgspec.json.decode(fidelity.to_json(report))) >= {"measured", "promises", "failed", "drift"}
    console = Console(record=True, width=200, file=io.StringIO())
    fidelity.print_report(report, console)
    assert "one reply dropped" in console.export_text()


def test_counts_do_not_rest_on_the_tree() -> None:
    """A builder that lied would be found out: a trace with one token changed."""
    exchanges = [exchange(0, SYSTEM, [5, END]), exchange(1, [*SYSTEM, 5, END, 4], [6, END])]
    built = fidelity_counts.build_session_from_traces(
        prefix_merging(read_session_paths(recorded(exchanges).session, exchanges))
    )
    built.trained[0].ids[0] += 1
    assert count_tokens(built, exchanges).wrong_context == 4
