"""Observes a call's replica while the call runs there: weight updates and freezing.

    EnginePool --assign, on_frozen, on_thawed, on_version_changed--> ReplicaObserver --> versions of the sampled tokens
                                                                           |
                                                                           +--> CallTimer (the session's clock)

Invariant: a token has a version only if it is known which weights sampled it.
"""

from polar.engines.replica import Replica
from polar.gateway.meter import CallTimer
from polar.gateway.token_record import TokenRecord
from polar.records.exchange import VersionSpan


class ReplicaObserver:
    """Observes the replica for one call (implements `engines.replica.RunningCall`)."""

    def __init__(self, record: TokenRecord, timer: CallTimer) -> None:
        self.replica: Replica | None = None
        self.record = record
        self._timer = timer
        self._versions = VersionTracker()

    def assign(self, replica: Replica) -> None:
        """Notes that the call goes to this replica. A call that gets no answer there is assigned to another one."""
        self.replica = replica
        self._versions = VersionTracker(
            replica.version, trusts_engine=replica.engine.capabilities.reports_weight_version
        )
        if replica.weights_lost:
            self._versions.record_change(replica.version, 0, boundary_known=False)

    def mark_begun(self) -> None:
        """Notes that the engine has begun with the call."""
        self._timer.mark_begun(frozen=self.replica is not None and self.replica.frozen)

    def on_frozen(self) -> None:
        self._timer.freeze()

    def on_thawed(self) -> None:
        self._timer.thaw()

    def on_version_changed(self, version: int, *, frozen: bool) -> None:
        """Notes that the weights changed under this call. If it stood frozen, the boundary is after the tokens so far;
        otherwise it is unknown. Before the first token, it is known only if tokens are streamed: an engine that replies
        whole may have sampled some."""
        record = self.record
        boundary_known = frozen and (bool(record.sampled) or record.tokens_come_at_once)
        self._versions.record_change(
            version, len(record.sampled), record.reported_versions, boundary_known=boundary_known
        )

    def build_version_spans(self) -> list[VersionSpan]:
        """Returns the versions of the tokens so far; empty if unknown."""
        return self._versions.build_spans(len(self.record.sampled), self.record.reported_versions)


class VersionTracker:
    """Tracks which policy version sampled which tokens: as the engine reports it, or as far as it can be known.

    Labels that are all older than the replica's known version may be stale, and don't count. An engine that maintains
    its labels itself (`trusts_engine`) may have restarted with other weights, so only its own labels count.
    """

    def __init__(self, version: int = 0, *, trusts_engine: bool = False) -> None:
        self._trusts_engine = trusts_engine
        self._spans: list[VersionSpan] = []
        self._version = version
        self._start = 0
        self._boundaries_known = True

    def record_change(
        self, version: int, sampled: int, reported: list[VersionSpan] | None = None, *, boundary_known: bool
    ) -> None:
        """Notes that tokens after the first `sampled` ones are of this version. `reported` are the engine's labels so
        far."""
        self._boundaries_known = self._boundaries_known and boundary_known
        self._spans = self.build_spans(sampled, reported)
        self._version, self._start = version, sampled

    def build_spans(self, sampled: int, reported: list[VersionSpan] | None) -> list[VersionSpan]:
        """Returns the versions of the first `sampled` tokens; empty if unknown."""
        if self._trusts_engine:
            return reported or []
        if reported and max(span.version for span in reported) >= self._version:
            return reported
        if not self._boundaries_known:
            return []
        if sampled <= self._start:
            return self._spans
        return [*self._spans, VersionSpan(self._version, self._start, sampled)]
