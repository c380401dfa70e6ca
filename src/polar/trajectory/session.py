"""A stored session as paths: which tokens each call saw and sampled, which part it played, and what of it trains."""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from polar import experts
from polar.dialects.wire import remembering
from polar.engines.base import VersionSpan
from polar.errors import StoreError
from polar.harnesses import knowledge
from polar.plugins import load as load_plugin
from polar.store.base import Exchange, Session, Store
from polar.trajectory import wire
from polar.trajectory.checker import HeldBack, SessionCheck, SessionChecker
from polar.trajectory.roles import Call, Labelled, Overrides, assign, call_of
from polar.trajectory.teacher import conditions
from polar.trajectory.types import (
    NO_VERSION,
    Excluded,
    Ids,
    Image,
    Path,
    Sampled,
    TokenCounts,
    Trajectory,
    TreeSession,
    TreeTrajectory,
)
from polar.types import Media, Message, Request, ToolResult

NO_IDS: Ids = np.empty(0, np.int32)
MERGED = "prefix_merging"
TREE = "prefix_tree"
"""The builder that takes many sessions and hands out a tree."""


async def load(store: Store, session_id: str) -> Sampled:
    """All of a session's paths. Raises StoreError where there is no such session."""
    session = await store.session(session_id)
    if session is None:
        raise StoreError(f"There is no session {session_id}.")
    exchanges = [exchange async for exchange in store.exchanges(session_id)]
    return await asyncio.to_thread(sampled, session, exchanges)


class Part(NamedTuple):
    """An exchange, read: what was asked, and the part that it plays in its session."""

    exchange: Exchange
    call: Call
    label: Labelled


def parts_of(session: Session, exchanges: Iterable[Exchange]) -> list[Part]:
    """Of all of a session's exchanges. Reading requests takes most of the time that a session's result does."""
    exchanges = list(exchanges)
    with remembering():
        calls = [call_of(exchange) for exchange in exchanges]
    labels = labelled(session, calls)
    return [Part(exchange, call, labels[exchange.exchange_id]) for exchange, call in zip(exchanges, calls, strict=True)]


def sampled(session: Session, exchanges: Iterable[Exchange]) -> Sampled:
    return sampled_in(session, parts_of(session, exchanges))


def sampled_in(session: Session, parts: Iterable[Part]) -> Sampled:
    overrides = Overrides.of(session.metadata)
    pictures: _Pictures = {}
    paths = [
        _path(exchange, _images(call.request, pictures), label, overrides, session.turn_rewards)
        for exchange, call, label in parts
        if exchange.sampled_ids is not None
    ]
    return Sampled(session.session_id, paths, session.reward, _reason(session), session.suspicious)


async def roles_of(store: Store, session_id: str) -> dict[str, Labelled]:
    """Each exchange's role and agent. Raises StoreError where there is no such session."""
    session = await store.session(session_id)
    if session is None:
        raise StoreError(f"There is no session {session_id}.")
    calls = [call_of(exchange) async for exchange in store.exchanges(session_id)]
    return await asyncio.to_thread(labelled, session, calls)


class Build(NamedTuple):
    """What is made of a session on its way out."""

    parts: list[Part]
    sampled: Sampled
    trajectory: Trajectory


def build(session: Session, exchanges: Sequence[Exchange], builder: str, checker: SessionChecker) -> Build:
    """What a builder makes of a session alone, checked. A tree is a group's: of one it is told as the traces it holds.
    Raises HeldBack."""
    check = checker.begin(session)
    check.rows(exchanges)
    parts = parts_of(session, exchanges)
    paths = sampled_in(session, parts)
    check.paths(exchanges, paths.paths)
    trajectory = run_builder(paths, builder)
    check.traces(trajectory)
    return Build(parts, paths, trajectory)


def run_builder(paths: Sampled, builder: str) -> Trajectory:
    """Unchecked: see `build`."""
    built: Trajectory = load_plugin("builders", MERGED if builder == TREE else builder)(paths)
    return built


class GroupTree:
    """The tree of a group's sessions, checked. A session that is held back has no tokens in it, and its reason in
    `sessions`."""

    def __init__(self, checker: SessionChecker) -> None:
        self._checker = checker
        self._checks: list[SessionCheck] = []
        self._sampled: list[Sampled] = []
        self._held: list[TreeSession] = []

    def add(self, session: Session, exchanges: Sequence[Exchange]) -> None:
        check = self._checker.begin(session)
        try:
            check.rows(exchanges)
            paths = sampled(session, exchanges)
            check.paths(exchanges, paths.paths)
        except HeldBack as error:
            self._hold_back(session, error)
            return
        self._checks.append(check)
        self._sampled.append(paths)

    def build(self) -> TreeTrajectory:
        build_tree = load_plugin("builders", TREE)
        tree: TreeTrajectory = build_tree(self._sampled)
        try:
            self._checker.check_tree(self._checks, tree)
        except HeldBack as error:
            tree = build_tree([])
            for check in self._checks:
                self._hold_back(check.session, error)
        tree.sessions += self._held
        return tree

    def _hold_back(self, session: Session, error: HeldBack) -> None:
        self._held.append(TreeSession(session.session_id, None, error.reason))


def nothing_of(session: Session, builder: str, error: HeldBack) -> tuple[Session, Trajectory]:
    """A session that is held back: without its reward, and without traces."""
    held = msgspec.structs.replace(session, reward=None, reason=error.reason)
    return held, Trajectory(session.session_id, builder, [], [], TokenCounts(0, 0, 0), None, error.reason)


async def encode_built(store: Store, session_id: str, builder: str, checker: SessionChecker) -> bytes:
    """What a builder makes of a session, as JSON. Raises StoreError where there is no such session."""
    session = await store.session(session_id)
    if session is None:
        raise StoreError(f"There is no session {session_id}.")
    exchanges = [exchange async for exchange in store.exchanges(session_id)]

    def encode() -> bytes:
        if builder == TREE:
            group = GroupTree(checker)
            group.add(session, exchanges)
            return msgspec.json.encode(wire.tree(group.build()))
        try:
            return msgspec.json.encode(wire.trajectory(build(session, exchanges, builder, checker).trajectory))
        except HeldBack as error:
            _, nothing = nothing_of(session, builder, error)
            return msgspec.json.encode(wire.trajectory(nothing, status="ERROR", error=str(error)))

    return await asyncio.to_thread(encode)


def labelled(session: Session, calls: list[Call], overrides: Overrides | None = None) -> dict[str, Labelled]:
    """Each call's role and agent."""
    harness = session.metadata.get("harness")
    known = knowledge(harness if isinstance(harness, str) else None)
    return assign(calls, known=known, overrides=overrides or Overrides.of(session.metadata))


def _reason(session: Session) -> str | None:
    if session.reward is not None:
        return None
    return session.reason or ("not_ended" if session.status == "open" else "not_evaluated")


def _path(
    exchange: Exchange, images: list[Image], label: Labelled, overrides: Overrides, rewards: dict[str, float]
) -> Path:
    ids = exchange.sampled_ids
    assert ids is not None
    trainable, excluded = _trainable(exchange, len(ids), label, overrides)
    prompt = NO_IDS if exchange.prompt_ids is None else exchange.prompt_ids
    routed = exchange.routed_experts if trainable else None
    return Path(
        session_id=exchange.session_id,
        exchange_id=exchange.exchange_id,
        seq=exchange.seq,
        prompt=prompt,
        sampled=ids,
        logprobs=exchange.logprobs if trainable else None,
        versions=_versions(exchange.versions, len(ids)) if trainable else None,
        trainable=trainable,
        excluded=excluded,
        role=label.role,
        agent_id=label.agent_id,
        branch_reason=exchange.branch_reason,
        temperature=exchange.sampling.temperature,
        scale=_scale(exchange, images) if trainable else None,
        finish_reason=exchange.finish_reason,
        reward=rewards.get(exchange.exchange_id),
        images=images,
        experts=None if routed is None else experts.read(routed, len(prompt) + len(ids)),
    )


def _trainable(exchange: Exchange, sampled: int, label: Labelled, overrides: Overrides) -> tuple[int, list[Excluded]]:
    """How many of the first sampled tokens train, and why the others don't."""
    reason = exchange.untrainable
    if reason is None and label.role not in overrides.trainable_roles:
        reason = f"role_{label.role}"
    kept = exchange.delivered if reason is None else 0
    excluded = []
    if reason is not None and exchange.delivered:
        excluded.append(Excluded(exchange.exchange_id, 0, exchange.delivered, reason))
    if exchange.delivered < sampled:
        late = "undelivered" if exchange.untrainable is None else exchange.untrainable
        excluded.append(Excluded(exchange.exchange_id, exchange.delivered, sampled, late))
    return kept, excluded


def _scale(exchange: Exchange, images: list[Image]) -> float | None:
    """Where the engine gave no log-probabilities, the trainer's own are those that were sampled with."""
    found = conditions(exchange, images=bool(images))
    if found.skip == "no_logprobs":
        return exchange.sampling.temperature or 1.0
    return found.temperature if found.skip is None else None


def _versions(spans: list[VersionSpan], sampled: int) -> Ids:
    versions = np.full(sampled, NO_VERSION, np.int32)
    for span in spans:
        versions[span.start : span.stop] = span.version
    return versions


_Pictures = dict[int, tuple[Message, list[Media]]]
"""Of each message, by its id()."""


def _images(request: Request, known: _Pictures) -> list[Image]:
    """Pictures are rendered by the engine, which doesn't say where their placeholders stand: they count from the
    prompt's beginning, so that prompts with other pictures share nothing. Rather too little is shared than too much."""
    shown = [piece for message in request.messages if (pieces := _pictures(message, known)) for piece in pieces]
    if not shown:
        return []
    found = hashlib.sha256()
    for piece in shown:
        found.update(msgspec.msgpack.encode(piece))
    return [Image(0, found.digest())]


def _pictures(message: Message, known: _Pictures) -> list[Media]:
    """`known` are those of messages that were looked at before: a session's requests repeat them."""
    seen = known.get(id(message))
    if seen is None:
        pieces = (piece for part in message.parts for piece in (part.parts if isinstance(part, ToolResult) else [part]))
        seen = known[id(message)] = message, [piece for piece in pieces if isinstance(piece, Media)]
    return seen[1]
