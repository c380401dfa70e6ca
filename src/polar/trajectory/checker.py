"""The automatic check: every session is verified before a trainer gets it, or is held back with a reason.

Where. Every output (a page of results, a task's status, a callback, the trajectory routes, `polar run --json`, `polar
export`) makes its document anew from a stored session, in the same three steps. The check stands between them:

    rows ── check_rows ──► paths ──► builder ── check_traces / check_tree ──► document

What. First the rows by themselves, then the builder's output against the rows, both by `verify`, which shares no code
with the builders. So a damaged database and a mistake in any builder are both found.

Which sessions. A share of them, chosen by a hash of the session's id: every reader, retry and restart checks the same
ones. 1 checks all of them and 0 none.

No memory. A verdict is not kept: a document that is made again is checked again. The check takes a small part of what
reading and building take (docs/benchmarks.md), and a remembered verdict would vouch for bytes that it has not seen.

A session that fails is held back: no traces, no reward, the reason `verify_failed` and a sentence. It stays in the
store, where `polar verify` shows all that is wrong. An exception in the check itself holds back as well, as
`verify_error`: a check that can't be run has not been passed.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from polar.records.exchange import Exchange
from polar.records.session import HeldBackError, Session
from polar.records.spans import ExchangeRole
from polar.records.trajectory import TokenPath, Trajectory, TreeTrajectory
from polar.trajectory.roles import RoleOverrides
from polar.trajectory.verify import ContextIndex, Problem, RecordedSession, check_records, check_trajectory, check_tree

log = logging.getLogger(__name__)


class CheckWatcher(Protocol):
    """Counts checks. It is called by the threads that build."""

    def record_check(self, error: HeldBackError | None) -> None:
        """Called after each check; `error` says why the session is held back."""
        ...

    def record_skip(self) -> None: ...

    def add_seconds(self, seconds: float) -> None:
        """Called with the CPU seconds of the checking thread."""
        ...


class NullCheckWatcher:
    def record_check(self, held: HeldBackError | None) -> None: ...

    def record_skip(self) -> None: ...

    def add_seconds(self, seconds: float) -> None: ...


def is_in_checked_share(session_id: str, share: float) -> bool:
    """Whether a session belongs to the share that is checked. A session that is checked at 0.1 is also checked at
    0.5."""
    if share >= 1 or share <= 0:
        return share >= 1
    digest = hashlib.blake2b(session_id.encode(), digest_size=8, person=b"polar-verify").digest()
    return int.from_bytes(digest, "big") < share * 2**64


def make_verify_failed_error(session_id: str, problems: Sequence[Problem]) -> HeldBackError:
    """Makes the error that holds back a session with one or more problems."""
    first = problems[0]
    exchange = f" (exchange {first.exchange_id})" if first.exchange_id else ""
    others = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return HeldBackError(
        session_id,
        "verify_failed",
        first.kind,
        f"Session {session_id} failed verification and is held back: {first.kind}: {first.message.rstrip('.')}"
        f"{exchange}{others}. Run `polar verify {session_id}` on the service's data for all of it.",
    )


def make_verify_error(session_id: str, error: Exception) -> HeldBackError:
    return HeldBackError(
        session_id,
        "verify_error",
        type(error).__name__,
        f"Session {session_id} is held back: its verification could not be run, which is a bug in Polar: {error!r}. "
        f"Run `polar verify {session_id}` on the service's data, and report it.",
    )


class SessionChecker:
    """Checks sessions before they are handed out. Thread-safe if its watcher is."""

    def __init__(self, share: float = 1.0, watcher: CheckWatcher | None = None) -> None:
        self.share = share
        self.watcher: CheckWatcher = watcher or NullCheckWatcher()

    def begin(self, session: Session) -> "SessionCheck":
        return SessionCheck(session, self)

    def check_tree(self, checks: Sequence["SessionCheck"], tree: TreeTrajectory) -> None:
        """Checks the tree of these sessions. Raises HeldBackError for all of them: their tokens share nodes, so none
        can be handed out without the others."""
        chosen = [check for check in checks if check.is_chosen]
        if not chosen:
            return
        failure: HeldBackError | None = None
        try:
            self.run_check(chosen[0].session.session_id, lambda: check_tree([check.recorded for check in checks], tree))
        except HeldBackError as error:
            failure = error
        for _ in chosen:
            self.watcher.record_check(failure)
        if failure is not None:
            raise failure

    def run_check(self, session_id: str, find_problems: Callable[[], Sequence[Problem]]) -> None:
        """Raises HeldBackError if `find_problems` returns problems, or fails."""
        started_at = time.thread_time()
        try:
            problems = find_problems()
        except Exception as error:  # a session that can't be verified is held back, whatever the cause
            log.exception("The verification of session %s failed", session_id)
            raise make_verify_error(session_id, error) from error
        finally:
            self.watcher.add_seconds(time.thread_time() - started_at)
        if problems:
            failure = make_verify_failed_error(problems[0].session_id or session_id, problems)
            log.error("%s", failure)
            raise failure


class SessionCheck:
    """The check of one session for one document: `check_rows`, then `set_paths`, then `check_traces` or the checker's
    `check_tree`."""

    recorded: RecordedSession  # only if the session is chosen

    def __init__(self, session: Session, checker: SessionChecker) -> None:
        self.session = session
        self.is_chosen = is_in_checked_share(session.session_id, checker.share)
        self.checker = checker
        self._contexts: ContextIndex | None = None
        if not self.is_chosen:
            checker.watcher.record_skip()

    def check_rows(self, exchanges: Sequence[Exchange]) -> None:
        """Checks the stored rows before anything is built from them. Raises HeldBackError."""
        if self.is_chosen:
            contexts = self._contexts = ContextIndex()
            self._run_check(lambda: check_records(exchanges, contexts=contexts))

    def set_paths(
        self, exchanges: Sequence[Exchange], paths: Sequence[TokenPath], roles: frozenset[ExchangeRole] | None = None
    ) -> None:
        """Sets the builder's input, which its output is compared with. `roles` restricts the roles that train. Raises
        HeldBackError if the paths can't be compared."""
        if not self.is_chosen:
            return
        trainable_roles = RoleOverrides.from_metadata(self.session.metadata).trainable_roles
        if roles is not None:
            trainable_roles &= roles

        def record() -> list[Problem]:
            self.recorded = RecordedSession(
                self.session, exchanges, paths, trainable_roles=trainable_roles, contexts=self._contexts
            )
            return []

        self._run_check(record)

    def check_traces(self, trajectory: Trajectory) -> None:
        """Checks the builder's output. Raises HeldBackError."""
        if self.is_chosen:
            self._run_check(lambda: check_trajectory(self.recorded, trajectory))
            self.checker.watcher.record_check(None)

    def _run_check(self, find_problems: Callable[[], Sequence[Problem]]) -> None:
        try:
            self.checker.run_check(self.session.session_id, find_problems)
        except HeldBackError as error:
            self.checker.watcher.record_check(error)
            raise
