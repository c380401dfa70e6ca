"""Builders make traces and trees for trainers, as walks over the token tree.

    per_request      a trace per exchange
    prefix_merging   a trace for each run of exchanges that extend one another, token for token
    prefix_tree      the whole tree, of one session or of a group

All of them train the same: each trainable token once, after exactly the tokens that it was sampled after, with the
log-probability and the policy version of that sampling, and with weight 1 / T in a session of T trainable tokens.

The tree that they walk is that of the tokens which training needs: prompts, and what trains after them. Paths that
train nothing, and sampled tokens behind the trainable ones, are not in it, so every leaf ends in a trainable token.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from polar.records.exchange import Logprobs
from polar.records.experts import Experts
from polar.records.spans import ExcludedSpan, Span, TokenCounts
from polar.records.trajectory import (
    NO_VERSION,
    ROOT,
    Mask,
    PolicyVersions,
    SessionPaths,
    Term,
    TokenPath,
    Trace,
    Trajectory,
    TreeSession,
    TreeTrajectory,
)
from polar.trajectory.tree import TokenTree, build_token_tree


def per_request(session: SessionPaths) -> Trajectory:
    """A trace per exchange that has trainable tokens."""
    paths = _select_trainable_paths(session)
    return _make_trajectory(session, "per_request", build_token_tree(paths), [[path] for path in paths])


def prefix_merging(session: SessionPaths) -> Trajectory:
    """An exchange goes on with a trace where its prompt begins with all of that trace: its prompt and what trains after
    it. Anything else begins a trace of its own, in which the tokens before its first sampled one are context.

    Where several could go on with one trace, one does: see `_merged`. There are as few traces as there can be, and they
    hold as few tokens as so many traces can.
    """
    paths = _select_trainable_paths(session)
    tree = build_token_tree(paths)
    # A trace has log-probabilities or has none: one without them would cost the others theirs.
    with_logprobs = [index for index, path in enumerate(paths) if path.logprobs is not None]
    without = [index for index, path in enumerate(paths) if path.logprobs is None]
    runs = sorted(_merge_runs(tree, with_logprobs) + _merge_runs(tree, without))
    return _make_trajectory(session, "prefix_merging", tree, [[paths[index] for index in run] for run in runs])


def prefix_tree(sessions: Sequence[SessionPaths]) -> TreeTrajectory:
    """The tree of one session, or of a group's, which share at least the task's prompt.

    It holds exactly the tokens that training needs, each once: those that train, and those before them. So what a
    trainer computes is what is unique, always. Tokens that train nothing, with nothing behind them that does, are left
    out; those of them that were sampled are in `excluded`, as with every builder.
    """
    trained = [_select_trainable_paths(session) for session in sessions]
    tree = build_token_tree([path for paths in trained for path in paths])
    totals = {session.session_id: session.num_trainable for session in sessions}
    terms = []
    for index, path in enumerate(tree.paths):
        versions = _select_trainable_versions(path)
        for span in tree.list_sampled_spans(index):
            stop = span.offset + span.stop - span.start
            term = Term(
                session_id=path.session_id,
                exchange_id=path.exchange_id,
                node=span.node,
                start=span.start,
                stop=span.stop,
                offset=span.offset,
                logprobs=None if path.logprobs is None else path.logprobs[span.offset : stop],
                policy_versions=versions[span.offset : stop],
                weight=(stop - span.offset) / totals[path.session_id],
                scale=path.scale,
            )
            terms.append(term)
    pieces = [tree.get_ids(number) for number in range(len(tree.nodes))]
    unique = tree.num_tokens
    return TreeTrajectory(
        ids=np.concatenate(pieces) if pieces else np.empty(0, np.int32),
        starts=np.cumsum([0, *map(len, pieces)], dtype=np.int64),
        parents=np.array([node.parent for node in tree.nodes], np.int32),
        depths=np.array([node.start for node in tree.nodes], np.int64),
        terms=terms,
        sessions=[
            TreeSession(
                session.session_id, session.reward, session.reason, _collect_turn_rewards(paths), session.suspicious
            )
            for session, paths in zip(sessions, trained, strict=True)
        ],
        excluded=[excluded for session in sessions for excluded in _collect_excluded(session)],
        tokens=TokenCounts(computed=unique, unique=unique, trainable=sum(totals.values())),
    )


# What goes in


def _sort_paths(session: SessionPaths) -> list[TokenPath]:
    return sorted(session.paths, key=lambda path: (path.seq, path.exchange_id))


def _select_trainable_paths(session: SessionPaths) -> list[TokenPath]:
    """Selects the paths with trainable tokens, cut behind the last of these."""
    return [
        path
        if path.num_trainable == len(path.sampled)
        else msgspec.structs.replace(path, sampled=path.sampled[: path.num_trainable])
        for path in _sort_paths(session)
        if path.num_trainable
    ]


def _collect_excluded(session: SessionPaths) -> list[ExcludedSpan]:
    return [excluded for path in _sort_paths(session) for excluded in path.excluded]


def _select_trainable_versions(path: TokenPath) -> PolicyVersions:
    if path.versions is None:
        return np.full(path.num_trainable, NO_VERSION, np.int32)
    return path.versions[: path.num_trainable]


def _collect_turn_rewards(paths: Iterable[TokenPath]) -> dict[str, float]:
    return {path.exchange_id: path.reward for path in paths if path.reward is not None}


# Which exchanges become one trace


def _merge_runs(tree: TokenTree, members: Sequence[int]) -> list[list[int]]:
    """Merges the given paths into runs, in which each path extends the one before it.

    A path can follow another that ends where its prompt ends, or above that in the tree. So the tree is walked from the
    leaves to the roots: where a prompt ends, its path begins to wait for a predecessor; where a path ends, one of the
    waiting paths below follows it, if there is any. All of them could as well follow a path that ends further up, so
    whichever is chosen, the number of runs is minimal. The deepest ends are served first, so the ends without a
    successor, up to which a trainer computes, are as shallow as possible. A path of the same agent is chosen first,
    then the one whose run has the most trainable tokens, then the earliest.
    """
    paths = tree.paths
    prompt_ends, path_ends = 1, 0  # at the same depth, prompts come first: a path can follow one that ends right there
    points: list[list[tuple[int, int, int]]] = [[] for _ in tree.nodes]
    for index in members:
        context = len(paths[index].prompt)
        if (number := tree.find_node(index, context)) != ROOT:
            points[number].append((context, prompt_ends, index))
        points[tree.ends[index]].append((context + len(paths[index].sampled), path_ends, index))

    trainable = {index: paths[index].num_trainable for index in members}  # of each run from there on
    successor: dict[int, int] = {}
    waiting: list[list[int]] = [[] for _ in tree.nodes]
    for number in reversed(range(len(tree.nodes))):
        candidates, waiting[number] = waiting[number], []
        for _, kind, index in sorted(points[number], reverse=True):
            if kind == prompt_ends:
                candidates.append(index)
            elif candidates:
                agent = _get_agent_key(paths[index])
                best = min(
                    candidates,
                    key=lambda path: (_get_agent_key(paths[path]) != agent, -trainable[path], path),
                )
                candidates.remove(best)
                successor[index] = best
                trainable[index] += trainable[best]
        if (parent := tree.nodes[number].parent) != ROOT:
            shorter, longer = sorted((candidates, waiting[parent]), key=len)
            longer.extend(shorter)
            waiting[parent] = longer

    runs = []
    for first in set(members) - set(successor.values()):
        run = [first]
        while run[-1] in successor:
            run.append(successor[run[-1]])
        runs.append(run)
    return runs


def _get_agent_key(path: TokenPath) -> tuple[str | None, str]:
    return path.agent_id, path.role


# What comes out


def _make_trajectory(
    session: SessionPaths, builder: str, tree: TokenTree, runs: Iterable[Sequence[TokenPath]]
) -> Trajectory:
    total = session.num_trainable
    traces = [_make_trace(session, run, total) for run in runs]
    computed = sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in traces)
    return Trajectory(
        session_id=session.session_id,
        builder=builder,
        traces=traces,
        excluded=_collect_excluded(session),
        tokens=TokenCounts(computed=computed, unique=tree.num_tokens, trainable=total),
        reward=session.reward,
        reason=session.reason,
    )


def _make_trace(session: SessionPaths, run: Sequence[TokenPath], total: int) -> Trace:
    """Makes the trace of a run. Each path begins with the whole path before it, so the last one has all tokens."""
    first, last = run[0], run[-1]
    context = len(first.prompt)
    response = np.concatenate([last.prompt[context:], last.sampled])
    mask: Mask = np.zeros(len(response), np.uint8)
    logprobs: Logprobs | None = None if first.logprobs is None else np.zeros(len(response), np.float32)
    versions: PolicyVersions = np.full(len(response), NO_VERSION, np.int32)
    spans = []
    for path in run:
        start = len(path.prompt) - context
        stop = start + path.num_trainable
        mask[start:stop] = 1
        versions[start:stop] = _select_trainable_versions(path)
        if logprobs is not None and path.logprobs is not None:
            logprobs[start:stop] = path.logprobs[: path.num_trainable]
        spans.append(Span(path.exchange_id, start, stop, 0))
    return Trace(
        session_id=session.session_id,
        prompt_ids=last.prompt[:context],
        response_ids=response,
        loss_mask=mask,
        logprobs=logprobs,
        policy_versions=versions,
        weight=sum(path.num_trainable for path in run) / total,
        exchange_ids=[path.exchange_id for path in run],
        spans=spans,
        role=first.role,
        agent_id=first.agent_id,
        branch_reason=first.branch_reason,
        temperature=first.temperature if len({path.temperature for path in run}) == 1 else None,
        finish_reason=last.finish_reason,
        reward=session.reward,
        reason=session.reason,
        turn_rewards=_collect_turn_rewards(run),
        scales={path.exchange_id: path.scale for path in run if path.scale is not None},
        experts=_merge_experts(run),
    )


def _merge_experts(run: Sequence[TokenPath]) -> Experts | None:
    """Merges the experts of a run's paths. Each token has those of the path that computed it first; later paths found
    its keys and values in the cache. Returns None if a path has no experts."""
    pieces: list[Experts] = []
    at = 0
    for path in run:
        if path.experts is None or (pieces and path.experts.shape[1:] != pieces[0].shape[1:]):
            return None
        stop = len(path.prompt) + len(path.sampled) - 1
        pieces.append(path.experts[at:stop])
        at = stop
    return np.concatenate(pieces)
