"""Sessions made by hand, and random ones: every way in which calls of a session hang together, with so few different
tokens that prefixes are shared by accident too."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from polar.records.exchange import TokenIds
from polar.records.spans import ExchangeRole, ExcludedSpan
from polar.records.trajectory import Image, SessionPaths, TokenPath

PLACEHOLDER = 9
ROLES: list[ExchangeRole] = ["main", "subagent", "compaction", "auxiliary"]

Symbol = tuple[int, bytes | None]
"""What the model sees at a place: a token, and the image that begins there."""


def path(
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
    """Every sampled token has a log-probability of its own, so that it is known wherever it turns up."""
    name = exchange_id or f"{session_id}-x{seq}"
    trains = len(sampled) if trainable is None else trainable
    rest = [ExcludedSpan(name, trains, len(sampled), "undelivered")] if trains < len(sampled) else []
    own = (-(np.arange(len(sampled)) + 1) / 64 - seq).astype(np.float32)
    return TokenPath(
        session_id=session_id,
        exchange_id=name,
        seq=seq,
        prompt=np.array(prompt, np.int32),
        sampled=np.array(sampled, np.int32),
        logprobs=own if logprobs else None,
        versions=np.arange(len(sampled), dtype=np.int32) // 2 + seq,
        num_trainable=trains,
        excluded=rest,
        role=role,
        agent_id=agent_id,
        branch_reason=f"reason {seq}",
        temperature=seq / 10,
        scale=scale,
        finish_reason=f"finish {seq}",
        reward=reward,
        images=list(images),
    )


def session(*paths: TokenPath, reward: float | None = 1.0, reason: str | None = None) -> SessionPaths:
    return SessionPaths(paths[0].session_id if paths else "s", list(paths), reward, reason)


def symbols(path: TokenPath) -> tuple[Symbol, ...]:
    """A path as the model sees it, up to its last trainable token."""
    digests = {image.position: image.digest for image in path.images}
    whole = [*path.prompt.tolist(), *path.sampled[: path.num_trainable].tolist()]
    return tuple((token, digests.get(place)) for place, token in enumerate(whole))


tokens = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def contexts(draw: st.DrawFn) -> list[Symbol]:
    """What stands between sampled turns: text, and sometimes an image."""
    made: list[Symbol] = [(token, None) for token in draw(tokens)]
    if draw(st.integers(0, 5)) == 0:
        made += [(PLACEHOLDER, draw(st.sampled_from([b"cat", b"dog"]))), (PLACEHOLDER, None)]
    return made


@st.composite
def sampled_sessions(draw: st.DrawFn, session_id: str = "s", roots: Sequence[list[Symbol]] = ()) -> SessionPaths:
    """A session of up to eight calls. `roots` are beginnings that it may share with others of its group."""
    known: list[tuple[list[Symbol], list[int], int]] = []  # prompt, sampled, trainable
    paths = []
    logprobs = draw(st.sampled_from([[True], [True], [False], [True, False]]))  # most engines give them, or don't
    for seq in range(draw(st.integers(0, 8))):
        way = (
            draw(st.sampled_from(["root", "extend", "extend", "extend", "fork", "retry", "same"])) if known else "root"
        )
        sampled = draw(tokens)
        if way == "root":
            beginnings = [st.sampled_from(list(roots))] if roots else []
            prompt = draw(st.one_of(*beginnings, contexts()))
        else:
            before, said, delivered = draw(st.sampled_from(known))
            if way == "extend":  # from what trains of it, or from more or less than that
                kept = draw(st.sampled_from([delivered, len(said), draw(st.integers(0, len(said)))]))
                prompt = [*before, *((token, None) for token in said[:kept]), *draw(contexts())]
            elif way == "fork":  # a history that was rewritten somewhere
                prompt = [*before[: draw(st.integers(0, len(before)))], *draw(contexts())]
            else:
                prompt = before
                sampled = said if way == "same" else sampled
        trainable = draw(st.sampled_from([len(sampled), len(sampled), 0, draw(st.integers(0, len(sampled)))]))
        known.append((prompt, sampled, trainable))
        paths.append(
            path(
                seq,
                [token for token, _ in prompt],
                sampled,
                trainable=trainable,
                session_id=session_id,
                role=draw(st.sampled_from(ROLES)),
                agent_id=draw(st.sampled_from([None, "a", "b"])),
                logprobs=draw(st.sampled_from(logprobs)),
                reward=draw(st.sampled_from([None, 0.5])),
                images=[Image(place, digest) for place, (_, digest) in enumerate(prompt) if digest is not None],
            )
        )
    return SessionPaths(session_id, paths, reward=draw(st.sampled_from([0.0, 1.0])))


@st.composite
def groups(draw: st.DrawFn) -> list[SessionPaths]:
    roots = draw(st.lists(contexts(), min_size=1, max_size=2))
    return [draw(sampled_sessions(f"s{number}", roots)) for number in range(draw(st.integers(1, 3)))]
