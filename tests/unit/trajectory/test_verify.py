"""What is sound passes; whatever is changed in what is handed out, one number at a time, is caught."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polar.records.exchange import Exchange, RawRequest, VersionSpan
from polar.records.session import Session
from polar.records.spans import TRAINABLE_ROLES, ExchangeRole, ExcludedSpan, TokenCounts
from polar.records.trajectory import Image, SessionPaths, Term, TokenPath, Trajectory, TreeSession, TreeTrajectory
from polar.trajectory.builders import per_request, prefix_merging, prefix_tree
from polar.trajectory.verify import Problem, RecordedSession, check_records, check_trajectory, check_tree

ROLES: dict[str, ExchangeRole] = {"a": "auxiliary", "r": "retry", "s": "subagent"}
"""By the last letter of an exchange's id; all others are main."""


def row(session_id: str, seq: int, prompt: Sequence[int], sampled: Sequence[int], **changes: Any) -> Exchange:
    count = len(sampled)
    known = Exchange(
        exchange_id=f"{session_id}-{seq}",
        session_id=session_id,
        seq=seq,
        dialect="openai_chat",
        params={},
        hints={},
        raw_request=RawRequest({}, "messages", []),
        status="complete",
        started_at=float(seq),
        ended_at=float(seq) + 0.5,
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=-np.linspace(0.5, 1.5, count, dtype=np.float32) - np.float32(seq),
        logprob_kind="raw",
        delivered=count,
        versions=[VersionSpan(seq % 3, 0, count)] if count < 2 else [VersionSpan(0, 0, 1), VersionSpan(seq, 1, count)],
        finish_reason="stop",
    )
    return msgspec.structs.replace(known, **changes)


def paths_of(exchanges: Sequence[Exchange]) -> list[TokenPath]:
    """What the rows hold, as the builders take it."""
    paths = []
    for it in exchanges:
        if it.prompt_ids is None or it.sampled_ids is None:
            continue
        count = len(it.sampled_ids)
        role = ROLES.get(it.exchange_id[-1], "main")
        trainable, reason = it.delivered, "undelivered"
        if it.untrainable is not None or role not in TRAINABLE_ROLES:
            trainable, reason = 0, it.untrainable or f"role_{role}"
        versions = [span.version for span in it.versions for _ in range(span.start, span.stop)]
        paths.append(
            TokenPath(
                session_id=it.session_id,
                exchange_id=it.exchange_id,
                seq=it.seq,
                prompt=it.prompt_ids,
                sampled=it.sampled_ids,
                logprobs=it.logprobs,
                versions=np.array(versions, np.int32) if it.versions else None,
                num_trainable=trainable,
                excluded=[ExcludedSpan(it.exchange_id, trainable, count, reason)] if trainable < count else [],
                role=role,
            )
        )
    return paths


class Sound:
    """A session's rows, and all that the builders make of them."""

    def __init__(self, session_id: str, exchanges: list[Exchange], paths: list[TokenPath] | None = None) -> None:
        self.exchanges = exchanges
        self.session = Session(session_id, b"", 0.0, reward=0.5)
        self.sampled = SessionPaths(session_id, paths_of(exchanges) if paths is None else paths, reward=0.5)
        self.recorded = RecordedSession(self.session, exchanges, self.sampled.paths)

    def check(self, trajectory: Trajectory) -> list[Problem]:
        return check_trajectory(self.recorded, trajectory)


@st.composite
def sessions(draw: st.DrawFn, session_id: str = "s") -> Sound:
    """Calls that go on from earlier ones, from half of one, or from nowhere, over so few tokens that they often share
    by chance; some untrainable, some auxiliary, some delivered in part."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    exchanges: list[Exchange] = []
    for seq in range(draw(st.integers(1, 6))):
        prompt = draw(tokens)
        if exchanges and draw(st.booleans()):
            before = draw(st.sampled_from(exchanges))
            assert before.prompt_ids is not None
            assert before.sampled_ids is not None
            prompt = [*before.prompt_ids.tolist(), *before.sampled_ids[: before.delivered].tolist(), *prompt]
        sampled = draw(tokens)
        kind = draw(st.sampled_from(["", "", "", "", "a", "s", "untrainable"]))
        exchange = row(session_id, seq, prompt, sampled)
        exchange.delivered = draw(st.sampled_from([len(sampled)] * 3 + [*range(len(sampled))]))
        if kind == "untrainable":
            exchange.untrainable = "structured_output"
        else:
            exchange.exchange_id += kind
        exchanges.append(exchange)
    return Sound(session_id, exchanges)


BUILDERS = [per_request, prefix_merging]


@given(sessions())
def test_what_the_builders_make_is_in_order(it: Sound) -> None:
    assert check_records(it.exchanges) == []
    for builder in BUILDERS:
        assert it.check(builder(it.sampled)) == []
    assert check_tree([it.recorded], prefix_tree([it.sampled])) == []


@given(sessions("s"), sessions("t"))
def test_so_is_the_tree_of_a_group(one: Sound, two: Sound) -> None:
    assert check_tree([one.recorded, two.recorded], prefix_tree([one.sampled, two.sampled])) == []


def changed(draw: st.DrawFn, array: Any, amount: Any = 1) -> Any:
    """With one number changed."""
    assume(array is not None and len(array))
    new = array.copy()
    new[draw(st.integers(0, len(new) - 1))] += amount
    return new


@settings(max_examples=60)
@given(st.data(), sessions(), st.sampled_from(BUILDERS))
def test_any_one_change_in_a_trace_is_caught(data: st.DataObject, it: Sound, builder: Any) -> None:
    trajectory = builder(it.sampled)
    assume(trajectory.traces)
    trace = data.draw(st.sampled_from(trajectory.traces))
    name = data.draw(
        st.sampled_from(["prompt_ids", "response_ids", "logprobs", "policy_versions", "loss_mask", "weight", "reward"])
    )
    if name == "loss_mask":
        trace.loss_mask = trace.loss_mask.copy()
        trace.loss_mask[data.draw(st.integers(0, len(trace.loss_mask) - 1))] ^= 1
    elif name in ("weight", "reward"):
        setattr(trace, name, getattr(trace, name) * 1.001)
    else:
        amount = np.float32(data.draw(st.sampled_from([-0.5, 1e-6, np.nan]))) if name == "logprobs" else 1
        before = getattr(trace, name)
        setattr(trace, name, data.draw(st.composite(changed)(before, amount)))
        assume(getattr(trace, name).tobytes() != before.tobytes())
    assert it.check(trajectory)


@given(st.data(), sessions(), st.sampled_from(BUILDERS))
def test_a_trace_that_is_missing_doubled_or_moved_is_caught(data: st.DataObject, it: Sound, builder: Any) -> None:
    trajectory = builder(it.sampled)
    assume(trajectory.traces)
    number = data.draw(st.integers(0, len(trajectory.traces) - 1))
    trace = trajectory.traces[number]
    how = data.draw(st.sampled_from(["missing", "doubled", "span", "shifted"]))
    if how == "missing":
        del trajectory.traces[number]
    elif how == "doubled":
        trajectory.traces.append(trace)
    elif how == "span":
        span = data.draw(st.sampled_from(trace.spans))
        field = data.draw(st.sampled_from(["start", "stop", "offset"]))
        moved = msgspec.structs.replace(span, **{field: getattr(span, field) + data.draw(st.sampled_from([-1, 1]))})
        trace.spans = [moved if other is span else other for other in trace.spans]
    else:  # one more token in front: every token that trains stands behind something it was not sampled behind
        trace.prompt_ids = np.concatenate((trace.prompt_ids[:1], trace.prompt_ids))
    assert it.check(trajectory)


@given(st.data(), sessions(), st.sampled_from([*BUILDERS, lambda session: prefix_tree([session])]))
def test_false_exclusions_are_caught(data: st.DataObject, it: Sound, builder: Any) -> None:
    built = builder(it.sampled)
    if built.excluded and data.draw(st.booleans()):
        excluded = data.draw(st.sampled_from(built.excluded))
        change = data.draw(
            st.sampled_from([{"reason": "role_main"}, {"reason": "other"}, {"stop": excluded.stop - 1}, {"start": -1}])
        )
        built.excluded.remove(excluded)
        if data.draw(st.booleans()):
            built.excluded.append(msgspec.structs.replace(excluded, **change))
    else:
        exchange = data.draw(st.sampled_from(it.exchanges))
        built.excluded.append(ExcludedSpan(exchange.exchange_id, 0, 1, "undelivered"))
    found = it.check(built) if isinstance(built, Trajectory) else check_tree([it.recorded], built)
    assert {problem.kind for problem in found} & {"lost", "twice", "reason", "structure"}


@settings(max_examples=60)
@given(st.data(), sessions("s"), sessions("t"))
def test_any_one_change_in_a_tree_is_caught(data: st.DataObject, one: Sound, two: Sound) -> None:
    tree = prefix_tree([one.sampled, two.sampled])
    assume(tree.terms)
    _spoil(data, tree)
    assert check_tree([one.recorded, two.recorded], tree)


def _spoil(data: st.DataObject, tree: TreeTrajectory) -> None:
    name = data.draw(st.sampled_from(["ids", "starts", "parents", "depths", "term", "fewer", "more", "session"]))
    if name in ("ids", "starts", "parents", "depths"):
        setattr(tree, name, data.draw(st.composite(changed)(getattr(tree, name))))
        return
    number = data.draw(st.integers(0, len(tree.terms) - 1))
    term = tree.terms[number]
    if name == "fewer":
        del tree.terms[number]
    elif name == "more":
        tree.terms.append(term)
    elif name == "session":
        tree.sessions[data.draw(st.integers(0, 1))].reward = 0.25
    else:
        field = data.draw(st.sampled_from(["node", "start", "stop", "offset", "logprobs", "policy_versions", "weight"]))
        value = getattr(term, field)
        if field in ("logprobs", "policy_versions"):
            value = data.draw(st.composite(changed)(value))
        else:
            value += 1
        tree.terms[number] = msgspec.structs.replace(term, **{field: value})


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"prompt_ids": np.array([1, -1], np.int32)}, "ids"),
        ({"sampled_ids": np.array([1, 99, 2], np.int32)}, "ids"),
        ({"sampled_ids": None, "delivered": 0}, "untrainable"),
        ({"prompt_ids": None}, "untrainable"),
        ({"finish_reason": "abort"}, "untrainable"),
        ({"untrainable": "logprobs_nan"}, "untrainable"),
        ({"untrainable": "version_unknown"}, "untrainable"),
        ({"delivered": 4}, "delivered"),
        ({"versions": []}, "version"),
        ({"versions": [VersionSpan(1, 0, 2)]}, "version"),
        ({"versions": [VersionSpan(1, 0, 2), VersionSpan(2, 1, 3)]}, "version"),
        ({"logprobs": None}, "logprob"),
        ({"logprobs": np.array([-1, -1], np.float32)}, "lengths"),
        ({"logprobs": np.array([-1, np.nan, -1], np.float32)}, "logprob"),
        ({"logprobs": np.array([-1, -1, 0.5], np.float32)}, "logprob"),
        ({"logprobs": np.array([-9999, -1, -1], np.float32)}, "logprob"),
        ({"parent": "nobody"}, "parent"),
        ({"checksum": b"0123456789abcdef"}, "checksum"),
    ],
)
def test_rows_that_are_not_in_order(changes: dict[str, Any], kind: str) -> None:
    exchange = row("s", 1, [1, 2], [3, 4, 5])
    assert check_records([exchange], vocabulary_size=50) == []
    (problem, *_) = check_records([msgspec.structs.replace(exchange, **changes)], vocabulary_size=50)
    assert problem.kind == kind


def test_a_row_that_says_why_it_must_not_train_may_hold_anything() -> None:
    exchange = row("s", 1, [1, -2], [3, 4, 5], untrainable="logprobs_nan", versions=[], finish_reason="abort")
    exchange.logprobs = np.array([np.nan], np.float32)
    assert check_records([exchange]) == []


def test_what_must_not_train_is_caught_when_it_does() -> None:
    """The builders are told that everything trains; the rows know better."""
    partial = row("s", 0, [1], [2, 3], delivered=1)
    marked = row("s", 1, [4], [5], untrainable="structured_output")
    aside = row("s", 2, [6], [7], exchange_id="s-2a")
    everything = [
        msgspec.structs.replace(path, num_trainable=len(path.sampled), excluded=[])
        for path in paths_of([partial, marked, aside])
    ]
    it = Sound("s", [partial, marked, aside], everything)
    for builder in BUILDERS:
        assert [(p.exchange_id, p.kind) for p in it.check(builder(it.sampled)) if p.kind != "weight"] == [
            ("s-0", "forbidden"),
            ("s-1", "forbidden"),
            ("s-2a", "forbidden"),
        ]


def test_equal_placeholders_of_different_images_are_different_contexts() -> None:
    first, second = row("s", 0, [9, 9, 1], [2]), row("s", 1, [9, 9, 1, 2, 3], [4])
    blind = paths_of([first, second])
    seeing = [
        msgspec.structs.replace(path, images=[Image(0, digest)])
        for path, digest in zip(blind, (b"cat", b"dog"), strict=True)
    ]
    it = Sound("s", [first, second], seeing)
    assert it.check(prefix_merging(it.sampled)) == []
    assert check_tree([it.recorded], prefix_tree([it.sampled])) == []
    unseen = SessionPaths("s", blind, reward=0.5)  # merged as if the two were the same
    assert [problem.kind for problem in it.check(prefix_merging(unseen))] == ["context"]
    assert [problem.kind for problem in check_tree([it.recorded], prefix_tree([unseen]))] == ["context"]


def kinds(problems: Sequence[Problem]) -> set[tuple[str | None, str]]:
    return {(problem.exchange_id, problem.kind) for problem in problems}


def tree_of(it: Sound, nodes: list[tuple[int, list[int]]], terms: list[tuple[int, int, int]]) -> TreeTrajectory:
    """A tree by hand: nodes as (parent, ids); of each term the exchange, its offset and the node, which is all it."""
    depths: list[int] = []
    for parent, _ in nodes:
        depths.append(0 if parent < 0 else depths[parent] + len(nodes[parent][1]))
    ids = np.array([id for _, own in nodes for id in own], np.int32)
    made = []
    for exchange, offset, node in terms:
        count = len(nodes[node][1])
        entry = it.recorded.entries[f"s-{exchange}"]
        assert entry.logprobs is not None
        here = slice(offset, offset + count)
        made.append(
            Term("s", entry.exchange_id, node, 0, count, offset, entry.logprobs[here], entry.versions[here], count / 3)
        )
    return TreeTrajectory(
        ids=ids,
        starts=np.cumsum([0, *(len(own) for _, own in nodes)], dtype=np.int64),
        parents=np.array([parent for parent, _ in nodes], np.int32),
        depths=np.array(depths, np.int64),
        terms=made,
        sessions=[TreeSession("s", 0.5, None)],
        excluded=[],
        tokens=TokenCounts(len(ids), len(ids), sum(len(nodes[node][1]) for _, _, node in terms)),
    )


def test_a_branch_that_hangs_below_the_wrong_node_is_caught() -> None:
    it = Sound("s", [row("s", 0, [1, 5], [6, 7]), row("s", 1, [2, 5], [8])])
    right = tree_of(it, [(-1, [1, 5]), (0, [6, 7]), (-1, [2, 5]), (2, [8])], [(0, 0, 1), (1, 0, 3)])
    assert check_tree([it.recorded], right) == []
    wrong = tree_of(it, [(-1, [1, 5]), (0, [6, 7]), (0, [8])], [(0, 0, 1), (1, 0, 2)])
    assert kinds(check_tree([it.recorded], wrong)) == {("s-1", "context")}


def test_terms_beside_their_path_are_caught() -> None:
    it = Sound("s", [row("s", 0, [1], [2, 3]), row("s", 1, [1], [8])])
    nodes = [(-1, [1]), (0, [2]), (1, [3]), (0, [8])]
    assert check_tree([it.recorded], tree_of(it, nodes, [(0, 0, 1), (0, 1, 2), (1, 0, 3)])) == []
    beside = tree_of(it, nodes, [(0, 0, 3), (0, 1, 2), (1, 0, 3)])
    assert kinds(check_tree([it.recorded], beside)) == {("s-0", "context")}


def test_tokens_that_nothing_needs_are_caught() -> None:
    it = Sound("s", [row("s", 0, [1], [2, 3, 4])])
    assert check_tree([it.recorded], tree_of(it, [(-1, [1]), (0, [2, 3, 4])], [(0, 0, 1)])) == []
    more = tree_of(it, [(-1, [1]), (0, [2, 3, 4]), (0, [9])], [(0, 0, 1)])
    assert kinds(check_tree([it.recorded], more)) == {(None, "structure")}
    trajectory = prefix_merging(it.sampled)
    (trace,) = trajectory.traces
    assert trace.logprobs is not None
    trace.response_ids = np.append(trace.response_ids, np.int32(9))
    trace.loss_mask = np.append(trace.loss_mask, np.uint8(0))
    trace.logprobs = np.append(trace.logprobs, np.float32(0))
    trace.policy_versions = np.append(trace.policy_versions, np.int32(-1))
    trajectory.tokens = TokenCounts(5, 4, 3)
    assert kinds(it.check(trajectory)) == {(None, "structure")}


def test_a_mask_that_says_otherwise_than_the_spans() -> None:
    it = Sound("s", [row("s", 0, [1], [2]), row("s", 1, [1, 2, 3], [4])])
    trajectory = prefix_merging(it.sampled)
    (trace,) = trajectory.traces
    trace.loss_mask = np.array([1, 1, 1], np.uint8)
    assert (None, "mask") in kinds(it.check(trajectory))
    trace.loss_mask = np.array([1, 0, 0], np.uint8)
    assert {(None, "mask"), ("s-1", "lost")} <= kinds(it.check(trajectory))


def test_context_has_no_numbers() -> None:
    it = Sound("s", [row("s", 0, [1], [2]), row("s", 1, [1, 2, 3], [4])])
    trajectory = prefix_merging(it.sampled)
    (trace,) = trajectory.traces
    assert trace.logprobs is not None
    trace.policy_versions[1] = 0
    assert kinds(it.check(trajectory)) == {(None, "version")}
    trace.policy_versions[1] = -1
    trace.logprobs[1] = -0.5
    assert kinds(it.check(trajectory)) == {(None, "logprob")}


def test_turns_have_their_own_rewards_or_it_is_caught() -> None:
    it = Sound("s", [row("s", 0, [1], [2]), row("s", 1, [1, 2, 3], [4])])
    it.session.turn_rewards = {"s-1": 0.75}
    assert {problem.kind for problem in it.check(prefix_merging(it.sampled))} == {"reward"}
    assert {problem.kind for problem in check_tree([it.recorded], prefix_tree([it.sampled]))} == {"reward"}
    it.sampled.paths[1].reward = 0.75
    assert it.check(per_request(it.sampled)) == it.check(prefix_merging(it.sampled)) == []
    assert check_tree([it.recorded], prefix_tree([it.sampled])) == []


def test_a_merge_by_prompts_alone_is_caught() -> None:
    """The classic mistake: turn 2's prompt has turn 1 tokenised anew, and yet both are put into one trace."""
    it = Sound("s", [row("s", 0, [1, 2], [3, 4]), row("s", 1, [1, 2, 5, 6], [7])])
    first, second = per_request(it.sampled).traces
    merged = msgspec.structs.replace(
        first,
        response_ids=np.array([3, 4, 6, 7], np.int32),
        loss_mask=np.array([1, 1, 0, 1], np.uint8),
        spans=[*first.spans, msgspec.structs.replace(second.spans[0], start=3, stop=4)],
    )
    trajectory = msgspec.structs.replace(per_request(it.sampled), traces=[merged])
    assert it.check(trajectory)


def test_rows_without_log_probabilities() -> None:
    """[engine] logprobs = false: the trainer computes them."""
    it = Sound("s", [row("s", 0, [1], [2, 3], logprobs=None, logprob_kind="none")])
    assert check_records(it.exchanges) == []
    trajectory = prefix_merging(it.sampled)
    assert it.check(trajectory) == []
    trajectory.traces[0].logprobs = np.zeros(2, np.float32)
    assert [problem.kind for problem in it.check(trajectory)] == ["logprob"]


def test_it_shares_no_code_with_what_it_checks() -> None:
    program = (
        "import sys, polar.trajectory.verify; print([n for n in sys.modules if n.startswith('polar.trajectory.')])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "polar.trajectory.tree" not in loaded
    assert "polar.trajectory.builders" not in loaded
