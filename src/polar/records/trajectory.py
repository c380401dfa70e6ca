"""The nouns of training data: what was sampled where, and how it is handed out.

    Exchange (a stored call) -> TokenPath (its tokens) -> TokenTree (all of them together) -> Trace, or the tree itself

The invariant, for every trainable token in a `Trace` or a `Term`: the tokens before it on its path are exactly those
that the engine conditioned on; its log-probability and its policy version are those of that sampling; and each
sampled token is trainable exactly once, or stands in an `ExcludedSpan` with a reason.
"""

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from polar.records.exchange import Logprobs, TokenIds
from polar.records.experts import Experts
from polar.records.spans import ExchangeRole, ExcludedSpan, Span, TokenCounts

PolicyVersions = NDArray[np.int32]
Mask = NDArray[np.uint8]

NO_VERSION = -1
"""The policy version of a token that nobody sampled (context)."""

ROOT = -1
"""The parent of a tree's first nodes."""


class Image(Struct, frozen=True, gc=False):
    """A picture (or clip, or file) in a prompt. Its placeholder tokens are the same whatever it shows, so two prompts
    are the same only as far as their images are."""

    position: int  # of its first placeholder in the prompt
    digest: bytes


class TokenPath(Struct):
    """One exchange as a path: the context it was sampled in, then what was sampled. What trains is
    `sampled[:trainable]`.

    `excluded` says why for all the rest: together they cover every sampled token once.
    """

    session_id: str
    exchange_id: str
    seq: int
    prompt: TokenIds
    sampled: TokenIds
    logprobs: Logprobs | None  # as long as `sampled`; None where the trainer recomputes them, or nothing trains
    versions: PolicyVersions | None  # likewise, one policy version per sampled token
    num_trainable: int  # how many of the first sampled tokens train
    excluded: list[ExcludedSpan] = field(default_factory=list)
    role: ExchangeRole = "main"
    agent_id: str | None = None
    branch_reason: str | None = None
    temperature: float | None = None
    scale: float | None = None  # what divides the logits whose log-probabilities these are; None where nobody can say
    finish_reason: str | None = None
    reward: float | None = None  # of this turn alone, where an evaluator gave one
    images: list[Image] = field(default_factory=list)
    experts: Experts | None = None  # of all tokens but the last, where the engine tells


class SessionPaths(Struct):
    """A session's paths, in order of `seq`, and what it earned: a reward, or the reason why there is none."""

    session_id: str
    paths: list[TokenPath]
    reward: float | None = None
    reason: str | None = None
    suspicious: bool = False  # its agent is proven to have tampered with its grading

    @property
    def num_trainable(self) -> int:
        return sum(path.num_trainable for path in self.paths)


class Trace(Struct):
    """A sequence for a trainer. Arrays of the response are aligned with `response_ids`: the mask is 1 where a token
    trains, and elsewhere the log-probability is 0 and the version NO_VERSION."""

    session_id: str
    prompt_ids: TokenIds
    response_ids: TokenIds
    loss_mask: Mask
    logprobs: Logprobs | None  # None where the engine gave none and the trainer recomputes them
    policy_versions: PolicyVersions
    weight: float  # its trainable tokens / the session's
    exchange_ids: list[str]  # whose sampled tokens train here, in order
    spans: list[Span]
    role: ExchangeRole
    agent_id: str | None
    branch_reason: str | None  # of the exchange that it begins with
    temperature: float | None  # None where its exchanges differ in it
    finish_reason: str | None  # of its last exchange
    reward: float | None = None
    reason: str | None = None  # why there is no reward
    turn_rewards: dict[str, float] = field(default_factory=dict)  # by exchange id
    scales: dict[str, float] = field(default_factory=dict)  # likewise: Path.scale, where it is known
    experts: Experts | None = None  # of all tokens but the last, where the engine tells


class Trajectory(Struct):
    """What a builder makes of one session."""

    session_id: str
    builder: str
    traces: list[Trace]
    excluded: list[ExcludedSpan]
    tokens: TokenCounts
    reward: float | None = None
    reason: str | None = None


class Term(Struct):
    """Tokens `start` to `stop` of a node's ids were sampled, and train, by one exchange of one session."""

    session_id: str
    exchange_id: str
    node: int
    start: int
    stop: int
    offset: int  # of the first one in the exchange's sampled tokens
    logprobs: Logprobs | None
    policy_versions: PolicyVersions
    weight: float  # tokens / the session's trainable tokens
    scale: float | None = None  # what divides the logits whose log-probabilities these are; None where nobody can say


class TreeSession(Struct):
    session_id: str
    reward: float | None
    reason: str | None
    turn_rewards: dict[str, float] = field(default_factory=dict)
    suspicious: bool = False


class TreeTrajectory(Struct):
    """The whole tree of one session or of a group, each unique token once. Node i's ids are
    `ids[starts[i]:starts[i + 1]]`, at depth `depths[i]` (of its first token), below node `parents[i]` (-1 for a root).
    A parent stands before its children."""

    ids: TokenIds
    starts: NDArray[np.int64]
    parents: NDArray[np.int32]
    depths: NDArray[np.int64]
    terms: list[Term]
    sessions: list[TreeSession]
    excluded: list[ExcludedSpan]
    tokens: TokenCounts
