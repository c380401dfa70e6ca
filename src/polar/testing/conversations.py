"""Sessions on their way out, made by hand: with tokens for the formats of traces, with messages for those of text."""

import hashlib
from collections.abc import Sequence
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
from polar.trajectory.session import read_session_paths as sampled_of
from polar.types import Part, Reply, SamplingParams, Text, Usage


def session(session_id: str, reward: float | None, reason: str | None, *, task_id: str | None, **known: Any) -> Session:
    metadata = {"model": "m"} | known | ({} if task_id is None else {"task_id": task_id})
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


def item(sampled: SessionPaths, build: Builder = prefix_merging, *, task_id: str | None = None) -> SessionItem:
    made = session(sampled.session_id, sampled.reward, sampled.reason, task_id=task_id)
    return SessionItem(made.summary, sampled, build(sampled))


def exported(exporter: Exporter, items: Sequence[SessionItem]) -> bytes:
    return b"".join([*map(exporter.feed, items), exporter.finish()])


class Talk:
    """A session in which an agent talks, call by call; tokens are made up, one for each word."""

    TOOLS = '[{"type":"function","function":{"name":"bash","parameters":{"type":"object"}}}]'

    def __init__(self, session_id: str = "s", dialect: str = "openai_chat") -> None:
        self.session_id = session_id
        self.dialect = dialect
        self.exchanges: list[Exchange] = []
        self.roles: dict[str, ExchangeRole] = {}

    def name(self, seq: int) -> str:
        """An exchange's id, as the gateway makes them."""
        return f"x{hashlib.blake2b(self.session_id.encode(), digest_size=4).hexdigest()}{seq:016d}"

    def call(
        self,
        messages: Sequence[dict[str, Any]],
        parts: Sequence[Part],
        *,
        role: ExchangeRole = "main",
        fields: dict[str, bytes] | None = None,
        **changes: Any,
    ) -> str:
        seq = len(self.exchanges)
        name = self.name(seq)
        spoken = [msgspec.json.encode(message) for message in messages]
        prompt = np.array([token_of(word) for item in spoken for word in item.split()], np.int32)
        written = {"model": b'"m"', "tools": self.TOOLS.encode()} if fields is None else fields
        exchange = Exchange(
            exchange_id=name,
            session_id=self.session_id,
            seq=seq,
            dialect=self.dialect,
            params={},
            hints={},
            raw_request=RawRequest(
                {key: Raw(value) for key, value in written.items()}, "messages", [Raw(item) for item in spoken]
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

    def item(self, reward: float | None = 1.0, reason: str | None = None, *, task_id: str | None = None) -> SessionItem:
        made = session(self.session_id, reward, reason, task_id=task_id, roles=self.roles)
        sampled = sampled_of(made, self.exchanges)
        return SessionItem(made.summary, sampled, prefix_merging(sampled), self.exchanges)


def token_of(word: bytes) -> int:
    return len(word)


def said(text: str) -> list[Part]:
    return [Text(text)]
