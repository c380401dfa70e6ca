"""Builds paths, trajectories and trees from stored sessions: which tokens each call saw, sampled and trains."""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from polar.dialects.raw_fields import cache_decoded_items
from polar.errors import StoreError
from polar.harnesses import find_call_patterns
from polar.plugins import load as load_plugin
from polar.records import experts, wire
from polar.records.exchange import Exchange, TokenIds, VersionSpan
from polar.records.session import HeldBackError, Session, SessionSummary
from polar.records.spans import ExcludedSpan, TokenCounts
from polar.records.trajectory import (
    NO_VERSION,
    Image,
    PolicyVersions,
    SessionPaths,
    TokenPath,
    Trajectory,
    TreeSession,
    TreeTrajectory,
)
from polar.store.base import Store
from polar.trajectory.checker import SessionCheck, SessionChecker
from polar.trajectory.roles import CallLabel, ModelCall, RoleOverrides, assign_roles, read_call
from polar.trajectory.teacher import find_logprob_conditions
from polar.types import Media, Message, Request, ToolResult

NO_IDS: TokenIds = np.empty(0, np.int32)
TRACE_BUILDER = "prefix_merging"
TREE_BUILDER = "prefix_tree"
"""The builder that takes many sessions and hands out a tree."""


async def load_session_paths(store: Store, session_id: str) -> SessionPaths:
    """Loads a session's paths. Raises StoreError if there is no such session."""
    session = await store.find_session(session_id)
    if session is None:
        raise StoreError(f"There is no session {session_id}.")
    exchanges = [exchange async for exchange in store.read_exchanges(session_id)]
    return await asyncio.to_thread(read_session_paths, session, exchanges)


class SessionCall(NamedTuple):
    """An exchange with its decoded request and its role in the session."""

    exchange: Exchange
    call: ModelCall
    label: CallLabel


def read_session_calls(session: Session | SessionSummary, exchanges: Iterable[Exchange]) -> list[SessionCall]:
    """Decodes all exchanges of a session and labels them. Decoding takes most of the time of a session's result."""
    exchanges = list(exchanges)
    with cache_decoded_items():
        calls = [read_call(exchange) for exchange in exchanges]
    labels = assign_session_roles(session, calls)
    return [
        SessionCall(exchange, call, labels[exchange.exchange_id])
        for exchange, call in zip(exchanges, calls, strict=True)
    ]


def read_session_paths(session: Session, exchanges: Iterable[Exchange]) -> SessionPaths:
    return build_session_paths(session, read_session_calls(session, exchanges))


def build_session_paths(session: Session, calls: Iterable[SessionCall]) -> SessionPaths:
    overrides = RoleOverrides.from_metadata(session.metadata)
    known_media: _MediaByMessage = {}
    paths = [
        _make_path(exchange, _collect_images(call.request, known_media), label, overrides, session.turn_rewards)
        for exchange, call, label in calls
        if exchange.sampled_ids is not None
    ]
    return SessionPaths(session.session_id, paths, session.reward, _explain_missing_reward(session), session.suspicious)


async def load_roles(store: Store, session_id: str) -> dict[str, CallLabel]:
    """Loads each exchange's role and agent. Raises StoreError if there is no such session."""
    session = await store.find_session(session_id)
    if session is None:
        raise StoreError(f"There is no session {session_id}.")
    calls = [read_call(exchange) async for exchange in store.read_exchanges(session_id)]
    return await asyncio.to_thread(assign_session_roles, session, calls)


class SessionBuild(NamedTuple):
    """What is built from a session for a document."""

    calls: list[SessionCall]
    session_paths: SessionPaths
    trajectory: Trajectory


def build_trajectory(
    session: Session, exchanges: Sequence[Exchange], builder: str, checker: SessionChecker
) -> SessionBuild:
    """Builds and checks a session's trajectory. Trees are for groups: for one session, TRACE_BUILDER takes the place
    of TREE_BUILDER. Raises HeldBackError."""
    check = checker.begin(session)
    check.check_rows(exchanges)
    parts = read_session_calls(session, exchanges)
    paths = build_session_paths(session, parts)
    check.set_paths(exchanges, paths.paths)
    trajectory = run_builder(paths, builder)
    check.check_traces(trajectory)
    return SessionBuild(parts, paths, trajectory)


def run_builder(paths: SessionPaths, builder: str) -> Trajectory:
    """Runs a builder without the check: see `build_trajectory`."""
    built: Trajectory = load_plugin("builders", TRACE_BUILDER if builder == TREE_BUILDER else builder)(paths)
    return built


class GroupTree:
    """Builds and checks the tree of a group's sessions. A session that is held back has no tokens in it, and its reason
    in `sessions`."""

    def __init__(self, checker: SessionChecker) -> None:
        self._checker = checker
        self._checks: list[SessionCheck] = []
        self._session_paths: list[SessionPaths] = []
        self._held_back: list[TreeSession] = []

    def add(self, session: Session, exchanges: Sequence[Exchange]) -> None:
        check = self._checker.begin(session)
        try:
            check.check_rows(exchanges)
            paths = read_session_paths(session, exchanges)
            check.set_paths(exchanges, paths.paths)
        except HeldBackError as error:
            self._hold_back(session, error)
            return
        self._checks.append(check)
        self._session_paths.append(paths)

    def build(self) -> TreeTrajectory:
        build_tree = load_plugin("builders", TREE_BUILDER)
        tree: TreeTrajectory = build_tree(self._session_paths)
        try:
            self._checker.check_tree(self._checks, tree)
        except HeldBackError as error:
            tree = build_tree([])
            for check in self._checks:
                self._hold_back(check.session, error)
        tree.sessions += self._held_back
        return tree

    def _hold_back(self, session: Session, error: HeldBackError) -> None:
        self._held_back.append(TreeSession(session.session_id, None, error.reason))


def hold_back_session(session: Session, builder: str, error: HeldBackError) -> tuple[Session, Trajectory]:
    """Returns the session without its reward, and an empty trajectory, both with the error's reason."""
    held_session = msgspec.structs.replace(session, reward=None, reason=error.reason)
    return held_session, Trajectory(session.session_id, builder, [], [], TokenCounts(0, 0, 0), None, error.reason)


async def encode_trajectory(store: Store, session_id: str, builder: str, checker: SessionChecker) -> bytes:
    """Builds a session's trajectory or tree, and encodes it as JSON. Raises StoreError if there is no such session."""
    session = await store.find_session(session_id)
    if session is None:
        raise StoreError(f"There is no session {session_id}.")
    exchanges = [exchange async for exchange in store.read_exchanges(session_id)]

    def encode() -> bytes:
        if builder == TREE_BUILDER:
            group = GroupTree(checker)
            group.add(session, exchanges)
            return msgspec.json.encode(wire.tree_to_dict(group.build()))
        try:
            return msgspec.json.encode(
                wire.trajectory_to_dict(build_trajectory(session, exchanges, builder, checker).trajectory)
            )
        except HeldBackError as error:
            _, empty = hold_back_session(session, builder, error)
            return msgspec.json.encode(wire.trajectory_to_dict(empty, status="ERROR", error=str(error)))

    return await asyncio.to_thread(encode)


def assign_session_roles(
    session: Session | SessionSummary, calls: list[ModelCall], overrides: RoleOverrides | None = None
) -> dict[str, CallLabel]:
    """Assigns each call's role and agent, with the patterns of the session's harness."""
    harness = session.metadata.get("harness")
    patterns = find_call_patterns(harness if isinstance(harness, str) else None)
    return assign_roles(calls, patterns=patterns, overrides=overrides or RoleOverrides.from_metadata(session.metadata))


def _explain_missing_reward(session: Session) -> str | None:
    if session.reward is not None:
        return None
    return session.reason or ("not_ended" if session.status == "open" else "not_evaluated")


def _make_path(
    exchange: Exchange, images: list[Image], label: CallLabel, overrides: RoleOverrides, rewards: dict[str, float]
) -> TokenPath:
    ids = exchange.sampled_ids
    assert ids is not None
    trainable, excluded = _count_trainable(exchange, len(ids), label, overrides)
    prompt = NO_IDS if exchange.prompt_ids is None else exchange.prompt_ids
    routed = exchange.routed_experts if trainable else None
    return TokenPath(
        session_id=exchange.session_id,
        exchange_id=exchange.exchange_id,
        seq=exchange.seq,
        prompt=prompt,
        sampled=ids,
        logprobs=exchange.logprobs if trainable else None,
        versions=_expand_versions(exchange.versions, len(ids)) if trainable else None,
        num_trainable=trainable,
        excluded=excluded,
        role=label.role,
        agent_id=label.agent_id,
        branch_reason=exchange.branch_reason,
        temperature=exchange.sampling.temperature,
        scale=_find_logit_scale(exchange, images) if trainable else None,
        finish_reason=exchange.finish_reason,
        reward=rewards.get(exchange.exchange_id),
        images=images,
        experts=None if routed is None else experts.decode_experts(routed, len(prompt) + len(ids)),
    )


def _count_trainable(
    exchange: Exchange, sampled: int, label: CallLabel, overrides: RoleOverrides
) -> tuple[int, list[ExcludedSpan]]:
    """Returns how many of the first sampled tokens train, and why the others don't."""
    reason = exchange.untrainable
    if reason is None and label.role not in overrides.trainable_roles:
        reason = f"role_{label.role}"
    trainable = exchange.delivered if reason is None else 0
    excluded = []
    if reason is not None and exchange.delivered:
        excluded.append(ExcludedSpan(exchange.exchange_id, 0, exchange.delivered, reason))
    if exchange.delivered < sampled:
        undelivered_reason = "undelivered" if exchange.untrainable is None else exchange.untrainable
        excluded.append(ExcludedSpan(exchange.exchange_id, exchange.delivered, sampled, undelivered_reason))
    return trainable, excluded


def _find_logit_scale(exchange: Exchange, images: list[Image]) -> float | None:
    """Returns what the logits are divided by for the log-probabilities, or None if unknown. If the engine gave none,
    the trainer recomputes them at the temperature that was sampled with."""
    conditions = find_logprob_conditions(exchange, images=bool(images))
    if conditions.skip_reason == "no_logprobs":
        return exchange.sampling.temperature or 1.0
    return conditions.temperature if conditions.skip_reason is None else None


def _expand_versions(spans: list[VersionSpan], sampled: int) -> PolicyVersions:
    versions = np.full(sampled, NO_VERSION, np.int32)
    for span in spans:
        versions[span.start : span.stop] = span.version
    return versions


_MediaByMessage = dict[int, tuple[Message, list[Media]]]
"""A message and its media, by the message's id()."""


def _collect_images(request: Request, cache: _MediaByMessage) -> list[Image]:
    """Collects a request's pictures as one image at the prompt's beginning. The engine renders them and does not say
    where their placeholders are, so prompts with different pictures share nothing: too little is better than too
    much."""
    media = [piece for message in request.messages for piece in _find_media(message, cache)]
    if not media:
        return []
    digest = hashlib.sha256()
    for piece in media:
        digest.update(msgspec.msgpack.encode(piece))
    return [Image(0, digest.digest())]


def _find_media(message: Message, cache: _MediaByMessage) -> list[Media]:
    """Finds a message's media. `cache` has those of earlier messages, since a session's requests repeat them."""
    entry = cache.get(id(message))
    if entry is None:
        pieces = (piece for part in message.parts for piece in (part.parts if isinstance(part, ToolResult) else [part]))
        entry = cache[id(message)] = message, [piece for piece in pieces if isinstance(piece, Media)]
    return entry[1]
