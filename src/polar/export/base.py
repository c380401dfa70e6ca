"""What an exporter is, and what most of them share.

An exporter gets sessions one by one and gives bytes. The invariant of the traces holds for whatever it writes: ids,
mask and log-probabilities are those of the trace, to the bit (a float32 is written as the double of the same value).

A trace is prompt, then response; the arrays that come with it are aligned with the response. Trainers differ in where
they want them, and in who divides the loss by what. Each module says both, and what its format can't hold.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from typing import Any, ClassVar, Literal, Protocol, cast, runtime_checkable

import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from polar.config import DEFAULT_RUN
from polar.records import wire
from polar.records.exchange import Exchange, TokenIds
from polar.records.result import SessionResult
from polar.records.session import Evidence, EvidenceKind, SessionSummary, is_suspicious
from polar.records.spans import TRAINABLE_ROLES, ExchangeRole
from polar.records.trajectory import NO_VERSION, SessionPaths, Trace, Trajectory
from polar.trajectory.checker import SessionCheck
from polar.trajectory.session import SessionCall

ExportNeed = Literal[
    "traces",  # at least one: a session with nothing to train is left out
    "messages",  # the session's exchanges come with it
    "tree",  # sessions of one group come one after another: traces, as one tree
    "group",  # likewise, each by itself
    "reward",  # a session without one is left out
    "accepted",  # so is one whose reward is too small to learn from by imitation
    "logprobs",  # and one where a trace has none
]


class SessionItem(Struct):
    """One session on its way out: what is known of it, what was sampled, and what the builder made of that.

    Of a received session only the traces are known: it has no paths, and its messages are in the result."""

    session: SessionSummary
    session_paths: SessionPaths
    trajectory: Trajectory
    exchanges: list[Exchange] = field(default_factory=list)
    roles: frozenset[ExchangeRole] = TRAINABLE_ROLES  # of calls that go out
    calls: list[SessionCall] | None = None  # the exchanges, read, where somebody has done so
    check: SessionCheck | None = None  # that the session has passed; a tree of several sessions is checked with theirs

    @property
    def group_id(self) -> str:
        return self.session.group_id

    @classmethod
    def from_result(cls, result: SessionResult) -> "SessionItem":
        """A session as a trainer receives it, so that it gets the same from a live run as from an export."""
        timing = result.metadata.get("timing", {})
        evidence = [
            Evidence(cast(EvidenceKind, one.kind), one.subject, one.proven, one.detail, one.count)
            for one in result.evidence
        ]
        summary = SessionSummary(
            result.session_id,
            created_at=float(timing.get("created_at") or 0.0),
            run=result.metadata.get("run", DEFAULT_RUN),
            metadata={**result.metadata, "task_id": result.task_id},
            ended_at=timing.get("ended_at"),
            reward=result.reward,
            reason=result.reason,
            suspicious=is_suspicious(evidence),
            evidence=evidence,
        )
        paths = SessionPaths(result.session_id, [], result.reward, result.reason)
        return cls(summary, paths, wire.trajectory_from_result(result))


class Exporter(Protocol):
    """An instance writes one file. Its class takes no arguments, but for options of the command line (`tokenizer`) that
    it names in `option_names`."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[ExportNeed]]
    is_binary: ClassVar[bool]
    rows: int  # written so far
    left_out: Counter[str]  # what it could not write, by reason

    def feed(self, item: SessionItem) -> bytes:
        """What can be written now, possibly nothing."""
        ...

    def finish(self) -> bytes:
        """The rest, after the last session."""
        ...


@runtime_checkable
class FolderExporter(Protocol):
    """An exporter whose file stands in a folder, with others beside it."""

    file_name: ClassVar[str]  # where in the folder
    extra_files: ClassVar[dict[str, str]]  # the others: what they say, by where they stand


class JsonLines(ABC):
    """An exporter that writes a JSON value a line."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[ExportNeed]]
    is_binary: ClassVar[bool] = False

    def __init__(self) -> None:
        self.rows = 0
        self.left_out: Counter[str] = Counter()
        self._encode = msgspec.json.Encoder().encode

    @abstractmethod
    def feed(self, item: SessionItem) -> bytes: ...

    def finish(self) -> bytes:
        return b""

    def encode_rows(self, rows: Iterable[Any]) -> bytes:
        written = [self._encode(row) + b"\n" for row in rows]
        self.rows += len(written)
        return b"".join(written)


class SessionLines(JsonLines):
    """One whose lines are each of one session."""

    @abstractmethod
    def build_lines(self, item: SessionItem) -> Iterable[Any]: ...

    def feed(self, item: SessionItem) -> bytes:
        return self.encode_rows(self.build_lines(item))


class TraceLines(SessionLines):
    """One with a line for each trace."""

    def build_lines(self, item: SessionItem) -> Iterable[Any]:
        return [self.build_row(item, index, trace) for index, trace in enumerate(item.trajectory.traces)]

    @abstractmethod
    def build_row(self, item: SessionItem, index: int, trace: Trace) -> Any: ...


def trace_metadata(item: SessionItem, index: int, trace: Trace) -> dict[str, Any]:
    """What trainers' classes have no field for. It goes where a format has room for more, so that a row says where it
    is from and can be turned back into the trace."""
    return {
        "session_id": item.session.session_id,
        "task_id": item.group_id,
        "trace": index,
        "traces": len(item.trajectory.traces),
        "reward": trace.reward,
        "reason": trace.reason,
        "suspicious": item.session.suspicious,
        "turn_rewards": trace.turn_rewards,
        "weight": trace.weight,
        "role": trace.role,
        "agent_id": trace.agent_id,
        "exchange_ids": trace.exchange_ids,
        "spans": [[span.start, span.stop] for span in trace.spans],
        "prompt_length": len(trace.prompt_ids),
        "policy_versions": trace.policy_versions.tolist(),
        "temperature": trace.temperature,
        "finish_reason": trace.finish_reason,
        "branch_reason": trace.branch_reason,
    }


def trace_token_ids(trace: Trace) -> TokenIds:
    """Prompt and response."""
    return np.concatenate([trace.prompt_ids, trace.response_ids])


def pad_over_prompt(trace: Trace, values: NDArray[Any], *, fill: float = 0) -> list[Any]:
    """Values of the response, with `fill` for each token of the prompt before them."""
    return [fill] * len(trace.prompt_ids) + list(values.tolist())


def list_logprobs(trace: Trace) -> list[float] | None:
    return None if trace.logprobs is None else list(trace.logprobs.tolist())


def require_logprobs(values: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Log-probabilities of a format that needs them: whatever has none was left out before."""
    if values is None:
        raise ValueError("a trace without log-probabilities reached a format that needs them")
    return values


def list_token_rewards(trace: Trace) -> list[float] | None:
    """The session's reward where a token trains, 0 elsewhere: advantages before anybody has looked at the group. None
    where there is no reward."""
    if trace.reward is None:
        return None
    return pad_over_prompt(trace, np.where(trace.loss_mask == 1, trace.reward, 0.0), fill=0.0)


def list_version_runs(trace: Trace) -> list[int]:
    """The policy versions that sampled it, in order, runs of the same one once."""
    known = trace.policy_versions[(trace.loss_mask == 1) & (trace.policy_versions != NO_VERSION)]
    return [version for version, _ in groupby(known.tolist())]


def compute_stable_number(*names: str) -> int:
    """A number for a name, for trainers that count where we name: the same in every export, and different for
    different names (53 bits, which every reader of JSON keeps)."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11
