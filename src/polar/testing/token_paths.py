"""Token paths for tests, and Hypothesis strategies for random sessions: every way in which calls of a session can share
a history, over so few different tokens that prefixes coincide by accident too."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from polar.records.exchange import TokenIds
from polar.records.spans import ExchangeRole, ExcludedSpan
from polar.records.trajectory import Image, SessionPaths, TokenPath

PLACEHOLDER = 9
ROLES: list[ExchangeRole] = ["main", "subagent", "compaction", "auxiliary"]

Symbol = tuple[int, bytes | None]
"""What the model sees at one position: a token, and the digest of an image that begins there."""


def make_path(
    seq: int,
    prompt: Sequence[int] | TokenIds,
    sampled: Sequence[int] | TokenIds,
    *,
    trainable: int | None = None,
    session_id: str = "s",
    exchange_id: str | None = None,
    role: ExchangeRole = "main",
    agent_id: str | None = None,
    logprobs: bool = True,
    reward: float | None = None,
    images: Sequence[Image] = (),
    scale: float | None = None,
) -> TokenPath:
    """A call of a session. Every sampled token has a different log-probability, so that a test can recognize it."""
    exchange_id = exchange_id or f"{session_id}-x{seq}"
    num_trainable = len(sampled) if trainable is None else trainable
    excluded = (
        [ExcludedSpan(exchange_id, num_trainable, len(sampled), "undelivered")] if num_trainable < len(sampled) else []
    )
    distinct_logprobs = (-(np.arange(len(sampled)) + 1) / 64 - seq).astype(np.float32)
    return TokenPath(
        session_id=session_id,
        exchange_id=exchange_id,
        seq=seq,
        prompt=np.array(prompt, np.int32),
        sampled=np.array(sampled, np.int32),
        logprobs=distinct_logprobs if logprobs else None,
        versions=np.arange(len(sampled), dtype=np.int32) // 2 + seq,
        num_trainable=num_trainable,
        excluded=excluded,
        role=role,
        agent_id=agent_id,
        branch_reason=f"reason {seq}",
        temperature=seq / 10,
        scale=scale,
        finish_reason=f"finish {seq}",
        reward=reward,
        images=list(images),
    )


def make_session_paths(*paths: TokenPath, reward: float | None = 1.0, reason: str | None = None) -> SessionPaths:
    return SessionPaths(paths[0].session_id if paths else "s", list(paths), reward, reason)


def list_symbols(path: TokenPath) -> tuple[Symbol, ...]:
    """The path as the model sees it, up to its last trainable token."""
    digests = {image.position: image.digest for image in path.images}
    tokens = [*path.prompt.tolist(), *path.sampled[: path.num_trainable].tolist()]
    return tuple((token, digests.get(position)) for position, token in enumerate(tokens))


token_lists = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def contexts(draw: st.DrawFn) -> list[Symbol]:
    """The context between sampled turns: text, and sometimes an image."""
    context: list[Symbol] = [(token, None) for token in draw(token_lists)]
    if draw(st.integers(0, 5)) == 0:
        context += [(PLACEHOLDER, draw(st.sampled_from([b"cat", b"dog"]))), (PLACEHOLDER, None)]
    return context


@st.composite
def sampled_sessions(draw: st.DrawFn, session_id: str = "s", roots: Sequence[list[Symbol]] = ()) -> SessionPaths:
    """A session of up to eight calls. `roots` are beginnings that it may share with others of its group."""
    known: list[tuple[list[Symbol], list[int], int]] = []  # prompt, sampled, trainable
    paths = []
    logprobs = draw(st.sampled_from([[True], [True], [False], [True, False]]))  # most engines give them, or don't
    for seq in range(draw(st.integers(0, 8))):
        origin = (
            draw(st.sampled_from(["root", "extend", "extend", "extend", "fork", "retry", "same"])) if known else "root"
        )
        sampled = draw(token_lists)
        if origin == "root":
            beginnings = [st.sampled_from(list(roots))] if roots else []
            prompt = draw(st.one_of(*beginnings, contexts()))
        else:
            prompt_before, reply, delivered = draw(st.sampled_from(known))
            if origin == "extend":  # from its trainable tokens, or from more or fewer
                kept = draw(st.sampled_from([delivered, len(reply), draw(st.integers(0, len(reply)))]))
                prompt = [*prompt_before, *((token, None) for token in reply[:kept]), *draw(contexts())]
            elif origin == "fork":  # a history that was rewritten somewhere
                prompt = [*prompt_before[: draw(st.integers(0, len(prompt_before)))], *draw(contexts())]
            else:
                prompt = prompt_before
                sampled = reply if origin == "same" else sampled
        trainable = draw(st.sampled_from([len(sampled), len(sampled), 0, draw(st.integers(0, len(sampled)))]))
        known.append((prompt, sampled, trainable))
        paths.append(
            make_path(
                seq,
                [token for token, _ in prompt],
                sampled,
                trainable=trainable,
                session_id=session_id,
                role=draw(st.sampled_from(ROLES)),
                agent_id=draw(st.sampled_from([None, "a", "b"])),
                logprobs=draw(st.sampled_from(logprobs)),
                reward=draw(st.sampled_from([None, 0.5])),
                images=[Image(position, digest) for position, (_, digest) in enumerate(prompt) if digest is not None],
            )
        )
    return SessionPaths(session_id, paths, reward=draw(st.sampled_from([0.0, 1.0])))


@st.composite
def session_groups(draw: st.DrawFn) -> list[SessionPaths]:
    roots = draw(st.lists(contexts(), min_size=1, max_size=2))
    return [draw(sampled_sessions(f"s{number}", roots)) for number in range(draw(st.integers(1, 3)))]
