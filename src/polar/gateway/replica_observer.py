"""What happens to a call's replica while the call runs there: weight updates, and freezing.

    EnginePool --assign, on_frozen, on_thawed, on_version_changed--> ReplicaObserver --> versions of the sampled tokens
                                                                           |
                                                                           +--> CallTimer (the session's clock)

Invariant: a token has a version only where it is known which weights sampled it.
"""

from polar.engines.replica import Replica
from polar.gateway.meter import CallTimer
from polar.gateway.token_record import TokenRecord
from polar.records.exchange import VersionSpan


class ReplicaObserver:
    """One call's view of the replica that it runs at (an `engines.replica.RunningCall`)."""

    def __init__(self, record: TokenRecord, timer: CallTimer) -> None:
        self.replica: Replica | None = None
        self.record = record
        self._timer = timer
        self._versions = VersionTracker()

    def assign(self, replica: Replica) -> None:
        """The call goes to this replica (and to another one, if it gets no answer there)."""
        self.replica = replica
        self._versions = VersionTracker(
            replica.version, trusts_engine=replica.engine.capabilities.reports_weight_version
        )
        if replica.weights_lost:
            self._versions.change(replica.version, 0, boundary_known=False)

    def mark_begun(self) -> None:
        """The engine has begun with the call."""
        self._timer.mark_begun(frozen=self.replica is not None and self.replica.frozen)

    def on_frozen(self) -> None:
        self._timer.freeze()

    def on_thawed(self) -> None:
        self._timer.thaw()

    def on_version_changed(self, version: int, *, frozen: bool) -> None:
        """The weights changed under this call. The boundary is known only if the call stood still meanwhile. Where
        nothing has come yet, nothing was sampled only if tokens are streamed: a whole reply may be half sampled."""
        record = self.record
        boundary_known = frozen and (bool(record.sampled) or record.tokens_come_at_once)
        self._versions.change(version, len(record.sampled), record.reported_versions, boundary_known=boundary_known)

    def version_spans(self) -> list[VersionSpan]:
        """The versions of the tokens so far; empty where unknown."""
        return self._versions.spans(len(self.record.sampled), self.record.reported_versions)


class VersionTracker:
    """Which policy version sampled which tokens: as the engine reports it, or as far as it can be known.

    An engine's labels count only where somebody keeps them up to date: labels that are all older than the version that
    the replica is known to have may be leftovers. An engine that keeps them itself (`trusts_engine`) may have come back
    with other weights than it was given, so only its own labels count.
    """

    def __init__(self, version: int = 0, *, trusts_engine: bool = False) -> None:
        self._trusts_engine = trusts_engine
        self._spans: list[VersionSpan] = []
        self._version = version
        self._start = 0
        self._boundaries_known = True

    def change(
        self, version: int, sampled: int, reported: list[VersionSpan] | None = None, *, boundary_known: bool
    ) -> None:
        """Tokens after the first `sampled` ones are of this version. `reported` are the engine's labels so far."""
        self._boundaries_known = self._boundaries_known and boundary_known
        self._spans = self.spans(sampled, reported)
        self._version, self._start = version, sampled

    def spans(self, sampled: int, reported: list[VersionSpan] | None) -> list[VersionSpan]:
        """The versions of the first `sampled` tokens; empty where unknown."""
        if self._trusts_engine:
            return reported or []
        if reported and max(span.version for span in reported) >= self._version:
            return reported
        if not self._boundaries_known:
            return []
        if sampled <= self._start:
            return self._spans
        return [*self._spans, VersionSpan(self._version, self._start, sampled)]
