"""A sample of a task, known again: by its number, and by its task's key, a digest of all that decides what it is about.

It is settled once it has an outcome: a reward, or none because its task says so. A session that was killed, cancelled
or failed by the platform settles nothing: another one stands for the sample, sooner or later.
"""

import hashlib

import msgspec

from polar.rollout.models import TaskRequest
from polar.rollout.semantics import MASKED
from polar.store.base import Session, Verdict

_ABOUT_RUNNING = {
    "num_samples",
    "dispatch_priority",
    "metadata",
    "callback_url",
    "builder",
    "early_stop_min_usable_sessions",
}

Sample = tuple[str, int]


def keyed(task: TaskRequest, source: str) -> TaskRequest:
    """The task, whose sessions say in their metadata which one it was, and where it is from."""
    asked = task.model_dump(mode="json", exclude=_ABOUT_RUNNING)
    key = hashlib.blake2b(msgspec.json.encode(asked, order="deterministic"), digest_size=12).hexdigest()
    return task.model_copy(update={"metadata": {"source": source, **task.metadata, "task_key": key}})


def sample_of(session: Session) -> Sample | None:
    """None for sessions that `polar run` did not begin."""
    key, sample = session.metadata.get("task_key"), session.metadata.get("sample")
    return (key, sample) if isinstance(key, str) and isinstance(sample, int) else None


def settles(verdict: Verdict) -> bool:
    return verdict.reward is not None or verdict.reason is None or verdict.reason in MASKED


def outcome_of(session: Session) -> Verdict | None:
    """None where it has none yet, or none that counts."""
    verdict = Verdict(session.reward, session.reason)
    return verdict if session.status == "ended" and settles(verdict) else None
