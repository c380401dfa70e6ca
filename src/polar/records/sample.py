"""A sample of a task, known again: by its number, and by its task's key, a digest of all that decides what it is about.

It is settled once it has an outcome: a reward, or none because its task says so. A session that was killed, cancelled
or failed by the platform settles nothing: another one stands for the sample, sooner or later.
"""

import hashlib

import msgspec

from polar.records.session import Session, Verdict
from polar.records.task import MASKED_REASONS, TaskRequest

_EXECUTION_FIELDS = {
    "num_samples",
    "dispatch_priority",
    "metadata",
    "callback_url",
    "builder",
    "early_stop_min_usable_sessions",
}

SampleKey = tuple[str, int]


def add_task_key(task: TaskRequest, source: str) -> TaskRequest:
    """The task, whose sessions say in their metadata which one it was, and where it is from."""
    asked = task.model_dump(mode="json", exclude=_EXECUTION_FIELDS)
    key = hashlib.blake2b(msgspec.json.encode(asked, order="deterministic"), digest_size=12).hexdigest()
    return task.model_copy(update={"metadata": {"source": source, **task.metadata, "task_key": key}})


def sample_key(session: Session) -> SampleKey | None:
    """None for sessions that `polar run` did not begin."""
    key, sample = session.metadata.get("task_key"), session.metadata.get("sample")
    return (key, sample) if isinstance(key, str) and isinstance(sample, int) else None


def is_final(verdict: Verdict) -> bool:
    return verdict.reward is not None or verdict.reason is None or verdict.reason in MASKED_REASONS


def final_verdict(session: Session) -> Verdict | None:
    """None where it has none yet, or none that counts."""
    verdict = Verdict(session.reward, session.reason)
    return verdict if session.status == "ended" and is_final(verdict) else None
