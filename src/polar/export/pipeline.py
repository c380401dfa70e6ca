"""From the store to an exporter: which sessions go out, one at a time, and a count of all that do not.

Sessions come newest first, as the store lists them; of a list of ids, in its order. An exporter that wants groups gets
the sessions of a task together: for that, all ids are read first, and the largest group is what memory has to hold. So
it is where only the best of a task are asked for; those come best first, and are counted as they go out, so that the
next best takes the place of one that is left out.

Every session that the selection names is counted once: as exported, or as left out with the reason.
"""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import msgspec
from msgspec import Struct, field

from polar.errors import ConfigError
from polar.export.base import Exporter, ExportNeed, SessionItem
from polar.export.messages import digest_conversations
from polar.records.result import SuspiciousFilter
from polar.records.sample import SampleKey, final_verdict, sample_key
from polar.records.session import HeldBackError, Session
from polar.records.spans import ExchangeRole, ExcludedSpan
from polar.records.trajectory import SessionPaths, Trajectory
from polar.store.base import Store
from polar.trajectory.checker import SessionChecker
from polar.trajectory.roles import RoleOverrides
from polar.trajectory.session import read_session_paths as sampled_of

_PAGE_SIZE = 100

Builder = Callable[[SessionPaths], Trajectory]


class Selection(Struct, frozen=True):
    """What is asked for. Empty fields ask for everything."""

    sessions: tuple[str, ...] = ()
    since: float | None = None  # unix seconds: sessions that began then or later
    min_reward: float | None = None
    roles: frozenset[ExchangeRole] = frozenset()
    best: int | None = None  # sessions of a task, those with the highest rewards
    unique: bool = False  # of sessions that say the same, one
    suspicious: SuspiciousFilter = "keep"


class ExportTally(Struct):
    """What went out, and what did not."""

    sessions: int = 0
    trainable_tokens: int = 0  # that train
    without_tokens: int = 0  # sessions that went out without a token
    without_pictures: int = 0  # sessions that went out without the pictures which they were shown
    other_roles: Counter[str] = field(default_factory=Counter)  # tokens that would train, by role
    excluded: Counter[str] = field(default_factory=Counter)  # tokens that don't train, by reason
    left_out: dict[str, Counter[str]] = field(default_factory=dict)  # sessions, by kind and then reason

    def count_left_out(self, kind: str, reason: str) -> None:
        self.left_out.setdefault(kind, Counter())[reason] += 1

    def describe(self) -> list[str]:
        """What did not go out, in sentences."""
        said = []
        for kind, reasons in self.left_out.items():
            sessions = "1 session" if reasons.total() == 1 else f"{reasons.total()} sessions"
            said.append(f"{sessions} {kind} {_was_or_were(reasons.total())} left out: {_format_counts(reasons)}")
        if self.other_roles:
            count = self.other_roles.total()
            tokens = "1 token" if count == 1 else f"{count} tokens"
            said.append(f"{tokens} of other roles {_was_or_were(count)} left out: {_format_counts(self.other_roles)}")
        if self.excluded:
            said.append(f"Sampled tokens that don't train: {_format_counts(self.excluded)}")
        if self.without_tokens:
            said.append(
                f"{self.without_tokens} of the sessions have no tokens: their engine told none. `--format "
                "sft` has what "
                "they say, and `--format sft-tokens --tokenizer DIR` another model's tokens for it"
            )
        if self.without_pictures:
            said.append(
                f"{self.without_pictures} of the sessions show pictures: tokens hold their places, the "
                "pictures are not here"
            )
        return said


def _was_or_were(count: int) -> str:
    return "was" if count == 1 else "were"


def _format_counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in counter.most_common())


async def select_items(
    store: Store,
    selection: Selection,
    needs: frozenset[ExportNeed],
    build: Builder,
    tally: ExportTally,
    checker: SessionChecker | None = None,
) -> AsyncIterator[SessionItem]:
    """The selected sessions that the exporter can take, as it needs them. Without a `checker`, all are checked."""
    checker = checker or SessionChecker()
    grouped = selection.best is not None or not needs.isdisjoint(("tree", "group"))
    sessions = _iter_by_group(store, selection, tally) if grouped else _filter_suspicious(store, selection, tally)
    settled: set[SampleKey] = set()
    seen_digests: set[bytes] = set()
    passed: Counter[str] = Counter()  # sessions that went out, by group
    async for session in sessions:
        if session.status == "open" and not selection.sessions:
            tally.count_left_out("still open", "named with --session they are exported as they are")
            continue
        was_rerun = not selection.sessions and _was_rerun(session, settled)
        if not was_rerun and not _has_wanted_reward(session, selection, needs, tally):
            continue
        if was_rerun or await _is_superseded(store, session):
            tally.count_left_out("whose sample another session stands for", "superseded")
            continue
        if selection.best is not None and passed[session.summary.group_id] >= selection.best:
            tally.count_left_out("that others of their task outdo", f"not among the best {selection.best}")
            continue
        exchanges = [exchange async for exchange in store.read_exchanges(session.session_id)]
        check = checker.begin(session)
        try:
            check.check_rows(exchanges)
            all_paths = sampled_of(session, exchanges)
            sampled = restrict_to_roles(all_paths, selection.roles, tally)
            check.set_paths(exchanges, sampled.paths, selection.roles or None)
            item = SessionItem(session.summary, sampled, build(sampled), check=check)
            check.check_traces(item.trajectory)
        except HeldBackError as held:
            tally.count_left_out("held back by verification", str(held))
            continue
        except ConfigError as error:
            tally.count_left_out("that can't be read", f"{session.session_id}: {error}")
            continue
        item.roles = selection.roles or RoleOverrides.from_metadata(session.metadata).trainable_roles
        if "messages" in needs:
            item.exchanges = exchanges
        if not has_trainable_traces(item, needs, tally):
            continue
        if selection.unique:
            if (
                digest := digest_conversations(
                    SessionItem(item.session, sampled, item.trajectory, exchanges, item.roles)
                )
            ) in seen_digests:
                tally.count_left_out("that say the same as another", "duplicate")
                continue
            seen_digests.add(digest)
        passed[session.summary.group_id] += 1
        tally.sessions += 1
        tally.without_tokens += _needs_tokens(needs) and not item.trajectory.traces and not item.trajectory.excluded
        tally.without_pictures += _needs_tokens(needs) and any(
            path.images for path in sampled.paths if path.num_trainable
        )
        tally.trainable_tokens += item.trajectory.tokens.trainable
        for excluded in (each for path in all_paths.paths for each in path.excluded):
            tally.excluded[excluded.reason] += excluded.stop - excluded.start
        yield item


async def export(found: AsyncIterator[SessionItem], exporter: Exporter, write: Callable[[bytes], object]) -> None:
    async for item in found:
        if data := exporter.feed(item):
            write(data)
    if data := exporter.finish():
        write(data)


def restrict_to_roles(sampled: SessionPaths, roles: frozenset[ExchangeRole], tally: ExportTally) -> SessionPaths:
    """The session, with only calls of these roles to train: tokens of the others are excluded, and are context at most.
    Weights are shares of what is left, so a session's still add up to 1."""
    if not roles:
        return sampled
    paths = []
    for path in sampled.paths:
        if path.num_trainable and path.role not in roles:
            tally.other_roles[path.role] += path.num_trainable
            reason = ExcludedSpan(path.exchange_id, 0, path.num_trainable, f"role_{path.role}")
            paths.append(msgspec.structs.replace(path, num_trainable=0, excluded=[reason, *path.excluded]))
        else:
            paths.append(path)
    return msgspec.structs.replace(sampled, paths=paths)


def _was_rerun(session: Session, settled: set[SampleKey]) -> bool:
    """One that settles nothing, where a later session has settled the same sample: `polar run --resume` ran it again.
    Sessions come newest first."""
    sample = sample_key(session)
    if sample is None:
        return False
    if final_verdict(session) is not None:
        settled.add(sample)
        return False
    return sample in settled


async def _is_superseded(store: Store, session: Session) -> bool:
    """A node may die between a session's verdict and its answer to the server: then another node runs it again."""
    task_id, work_id = session.metadata.get("task_id"), session.metadata.get("work_id")
    if not isinstance(task_id, str) or not isinstance(work_id, int):  # of no server's
        return False
    standing = await store.find_accepted_session(session.run, task_id, work_id)
    return standing is not None and standing != session.session_id


def _has_wanted_reward(
    session: Session, selection: Selection, needs: frozenset[ExportNeed], tally: ExportTally
) -> bool:
    least = selection.min_reward
    if session.reward is None:
        if least is not None or selection.best is not None or not needs.isdisjoint(("reward", "accepted")):
            unsaid = "not_ended" if session.status == "open" else "not_evaluated"
            tally.count_left_out("without a reward", session.reason or unsaid)
            return False
    elif least is not None and session.reward < least:
        tally.count_left_out("of too small a reward", f"below {least:g}")
        return False
    elif least is None and "accepted" in needs and session.reward <= 0:
        tally.count_left_out("of too small a reward", "not above 0")
        return False
    return True


def _needs_tokens(needs: frozenset[ExportNeed]) -> bool:
    """A format without messages, which is where pictures are."""
    return "traces" in needs or "messages" not in needs


def has_trainable_traces(item: SessionItem, needs: frozenset[ExportNeed], tally: ExportTally) -> bool:
    if "traces" in needs and not item.trajectory.traces:
        reasons = {excluded.reason for excluded in item.trajectory.excluded}
        tally.count_left_out("with nothing to train", " and ".join(sorted(reasons)) or "nothing sampled")
        return False
    if "logprobs" in needs and any(trace.logprobs is None for trace in item.trajectory.traces):
        tally.count_left_out("without log-probabilities", "the trainer would have to recompute them")
        return False
    return True


async def _list_sessions(store: Store, selection: Selection) -> AsyncIterator[Session]:
    since = float("-inf") if selection.since is None else selection.since
    if selection.sessions:
        for session_id in selection.sessions:
            session = await store.find_session(session_id)
            if session is None:
                raise ConfigError(f"There is no session {session_id}.")
            if session.created_at >= since:
                yield session
        return
    last: str | None = None
    while page := await store.list_sessions(limit=_PAGE_SIZE, before=last):
        for session in page:
            if session.created_at < since:
                return
            yield session
        last = page[-1].session_id


async def _filter_suspicious(store: Store, selection: Selection, tally: ExportTally) -> AsyncIterator[Session]:
    """Those that the filter of suspicious sessions lets through."""
    async for session in _list_sessions(store, selection):
        if selection.suspicious == "exclude" and session.suspicious:
            kinds = {one.kind for one in session.evidence if one.proven}
            tally.count_left_out("whose agent tampered with its grading", " and ".join(sorted(kinds)))
        elif selection.suspicious == "only" and not session.suspicious:
            tally.count_left_out("without proven tampering", "not suspicious")
        else:
            yield session


async def _iter_by_group(store: Store, selection: Selection, tally: ExportTally) -> AsyncIterator[Session]:
    """In order of each group's first session. Only ids are held."""
    groups: defaultdict[str, list[_RankedSession]] = defaultdict(list)
    async for session in _filter_suspicious(store, selection, tally):
        groups[session.summary.group_id].append(_RankedSession.from_session(session))
    for members in groups.values():
        if selection.best is not None:
            # Of equal ones the first sample, whenever it was run: so a run that was stopped on the way gives the same.
            members.sort(key=_RankedSession.sort_key)
        async for session in _list_sessions(store, Selection(tuple(one.session_id for one in members))):
            yield session


class _RankedSession(NamedTuple):
    session_id: str
    reward: float | None
    sample: int
    created_at: float

    @classmethod
    def from_session(cls, session: Session) -> "_RankedSession":
        sample = session.metadata.get("sample")
        return cls(session.session_id, session.reward, sample if isinstance(sample, int) else 0, session.created_at)

    def sort_key(self) -> tuple[bool, float, int, float]:
        """The highest rewards first, sessions without one last."""
        return self.reward is None, -(self.reward or 0.0), self.sample, self.created_at
