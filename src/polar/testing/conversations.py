"""Sessions for tests of exporters and bridges: made of token paths, or of whole conversations with messages."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from polar.export.base import Exporter, SessionItem
from polar.export.pipeline import Builder
from polar.records.exchange import Exchange, RawRequest, VersionSpan
from polar.records.session import Session
from polar.records.spans import ExchangeRole
from polar.records.trajectory import SessionPaths
from polar.trajectory.builders import prefix_merging
from polar.trajectory.session import read_session_paths
from polar.types import Part, Reply, SamplingParams, Text, Usage


def make_session(
    session_id: str, reward: float | None, reason: str | None, *, task_id: str | None, **metadata: Any
) -> Session:
    metadata = {"model": "m"} | metadata | ({} if task_id is None else {"task_id": task_id})
    return Session(
        session_id,
        b"hash",
        created_at=1_700_000_000.0,
        metadata=metadata,
        status="ended",
        ended_at=1_700_000_060.0,
        reward=reward,
        reason=reason,
    )


def make_session_item(
    sampled: SessionPaths, build: Builder = prefix_merging, *, task_id: str | None = None
) -> SessionItem:
    session = make_session(sampled.session_id, sampled.reward, sampled.reason, task_id=task_id)
    return SessionItem(session.summary, sampled, build(sampled))


def export_items(exporter: Exporter, items: Iterable[SessionItem]) -> bytes:
    """The complete output of an exporter."""
    return b"".join([*map(exporter.feed, items), exporter.finish()])


class ConversationBuilder:
    """Builds a session from its model calls, one at a time. Tokens are invented: one for each word of the prompt, three
    for each reply."""

    TOOLS = '[{"type":"function","function":{"name":"bash","parameters":{"type":"object"}}}]'

    def __init__(self, session_id: str = "s", dialect: str = "openai_chat") -> None:
        self.session_id = session_id
        self.dialect = dialect
        self.exchanges: list[Exchange] = []
        self.roles: dict[str, ExchangeRole] = {}

    def make_exchange_id(self, seq: int) -> str:
        """The id of call `seq`, in the form of the gateway's ids."""
        return f"x{hashlib.blake2b(self.session_id.encode(), digest_size=4).hexdigest()}{seq:016d}"

    def add_call(
        self,
        messages: Sequence[dict[str, Any]],
        parts: Sequence[Part],
        *,
        role: ExchangeRole = "main",
        fields: dict[str, bytes] | None = None,
        **changes: Any,
    ) -> str:
        """Adds a call and returns its exchange id. `fields` are the body's besides `messages`; `changes`
        are fields of the Exchange."""
        seq = len(self.exchanges)
        name = self.make_exchange_id(seq)
        encoded = [msgspec.json.encode(message) for message in messages]
        prompt = np.array([make_token(word) for item in encoded for word in item.split()], np.int32)
        written = {"model": b'"m"', "tools": self.TOOLS.encode()} if fields is None else fields
        exchange = Exchange(
            exchange_id=name,
            session_id=self.session_id,
            seq=seq,
            dialect=self.dialect,
            params={},
            hints={},
            raw_request=RawRequest(
                {key: Raw(value) for key, value in written.items()}, "messages", [Raw(item) for item in encoded]
            ),
            status="complete",
            started_at=1.0 + seq,
            ended_at=1.5 + seq,
            reply=Reply(name, "m", 1, list(parts), "stop"),
            prompt_ids=prompt,
            sampled_ids=np.arange(3, dtype=np.int32) + 10 * seq,
            logprobs=(-np.arange(1, 4) / 7 - seq).astype(np.float32),
            logprob_kind="raw",
            delivered=3,
            sampling=SamplingParams(temperature=1.0),
            versions=[VersionSpan(4, 0, 3)],
            finish_reason="stop",
            usage=Usage(len(prompt), 3, 1),
        )
        self.exchanges.append(msgspec.structs.replace(exchange, **changes))
        self.roles[name] = role
        return name

    def build_item(
        self, reward: float | None = 1.0, reason: str | None = None, *, task_id: str | None = None
    ) -> SessionItem:
        session = make_session(self.session_id, reward, reason, task_id=task_id, roles=self.roles)
        sampled = read_session_paths(session, self.exchanges)
        return SessionItem(session.summary, sampled, prefix_merging(sampled), self.exchanges)


def make_token(word: bytes) -> int:
    return len(word)


def make_text_parts(text: str) -> list[Part]:
    return [Text(text)]
