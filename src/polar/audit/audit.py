"""An audit: every row of a dump looked at, with a model or without.

It also finds samplings that are trained more than once: the same token, in the same context, with the same
log-probability. Two samples of a group may say the same by chance. So rows that do not call themselves parts of one
rollout are believed where what they share was likely enough.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from polar.audit import comparison
from polar.audit.comparison import ComparedRow, Floats, PolicyMatch, match_policy, measure_noise
from polar.audit.rows import PROBLEM_KINDS, RolloutRow, RowProblem, find_turn_number, find_usable_logprobs, split_turns
from polar.errors import ConfigError
from polar.trajectory.teacher import Teacher

Track = Callable[[Sequence[RolloutRow]], Iterable[RolloutRow]]

CLEAN, UNCHECKED = "clean", "not compared"
_MAX_CHANCE_LOGPROB = -20.0
"""The log-probability below which nobody says the same twice."""


class RowAudit(Struct):
    """What came of one row."""

    number: int
    rollout: str | None
    tokens: int
    trained: int
    compared: int = 0
    off: int = 0  # by more than noise explains
    largest: float = 0.0
    skip: str | None = None  # why nothing was compared
    problems: list[RowProblem] = field(default_factory=list)  # the gravest first

    @property
    def verdict(self) -> str:
        if self.problems:
            return self.problems[0].kind
        return CLEAN if self.compared or not self.trained else UNCHECKED


class AuditReport(Struct):
    rows: list[RowAudit]
    policy: PolicyMatch | None  # None without a model

    @property
    def problem_counts(self) -> Counter[str]:
        """Rows by what is wrong with them; a row may count several times."""
        return Counter(kind for row in self.rows for kind in {problem.kind for problem in row.problems})

    @property
    def faulty_rows(self) -> list[RowAudit]:
        return [row for row in self.rows if row.problems]

    @property
    def skipped(self) -> Counter[str]:
        return Counter(row.skip for row in self.rows if row.skip is not None)

    @property
    def worst_row(self) -> RowAudit | None:
        return min(self.faulty_rows, key=lambda row: _rank_severity(row.problems[0]), default=None)

    @property
    def failure_message(self) -> str | None:
        """What is wrong, in a sentence or two."""
        told = None if self.policy is None else self.policy.description
        if (first := self.worst_row) is not None:
            problem = first.problems[0]
            where = f"row {first.number}" + ("" if problem.position is None else f", token {problem.position}")
            return (
                f"{len(self.faulty_rows)} of {len(self.rows)} rows are not in order; the gravest is {where}: "
                f"{problem.message[0].lower()}{problem.message[1:]}." + (f" {told}" if told else "")
            )
        if self.policy is not None and not any(row.compared for row in self.rows):
            return "No log-probability could be compared."
        return told


def audit(
    rows: Sequence[RolloutRow],
    teacher: Teacher | None = None,
    *,
    tolerance: float,
    temperature: float = 1.0,
    version: int | None = None,
    track: Track = iter,
) -> AuditReport:
    """`tolerance` is what first turns may differ by in the mean before other weights are blamed; breaks are judged by
    the noise that first turns have. `track` gets the rows that go through the model and gives them on, and may show how
    far they are. Raises ConfigError."""
    if version is not None and any(row.versions is None for row in rows):
        raise ConfigError("These rows do not say which policy version sampled a token: leave --policy-version out.")
    checked = {
        row.number: RowAudit(row.number, row.rollout, len(row.ids), int(row.mask.sum()), problems=list(row.problems))
        for row in rows
    }
    for number, problem in find_repeats(rows).items():
        checked[number].problems.append(problem)
    found = None
    if teacher is not None:
        found = _recompute(rows, checked, teacher, tolerance, temperature, version, track)
    for row in checked.values():
        row.problems.sort(key=_rank_severity)
    return AuditReport(list(checked.values()), found)


def _recompute(
    rows: Sequence[RolloutRow],
    checked: dict[int, RowAudit],
    teacher: Teacher,
    tolerance: float,
    temperature: float,
    version: int | None,
    track: Track,
) -> PolicyMatch:
    fitting = [row for row in rows if _check_comparable(row, checked[row.number], teacher)]

    def compared(temperature: float) -> list[ComparedRow]:
        """What a row shares with the one before stays in the teacher's cache, so they go in the order of their ids."""
        ordered = sorted(fitting, key=lambda row: row.ids.astype(">i4").tobytes())
        return [
            comparison.compare(row, _compute_logprobs(row, teacher, temperature), version) for row in track(ordered)
        ]

    all_rows = compared(temperature)
    found = match_policy(
        [row for row in all_rows if comparison.find_shift(row) is None], tolerance, temperature, teacher
    )
    if found.kind == "temperature":
        all_rows = compared(found.temperature)
        found = PolicyMatch("temperature", found.temperature, measure_noise(all_rows))
    for row in all_rows:
        into = checked[row.row.number]
        differences = row.compute_differences(row.positions)
        into.compared = len(differences)
        into.off = int((differences > found.noise.outlier_threshold).sum())
        into.largest = float(differences.max(initial=0.0))
        into.problems += comparison.find_problems(row, found.noise)
        if found.explains(row, tolerance):
            into.problems.append(RowProblem(found.kind, PROBLEM_KINDS[found.kind].capitalize()))
    return found


def _check_comparable(row: RolloutRow, row_audit: RowAudit, teacher: Teacher) -> bool:
    if row.skip is not None:
        row_audit.skip = row.skip
    elif not row.has_matching_lengths or row.logprobs is None:
        row_audit.skip = "lengths" if not row.has_matching_lengths else "missing"
    elif len(row.ids) and (row.ids.min() < 0 or row.ids.max() >= teacher.vocabulary_size):
        strange = int(np.flatnonzero((row.ids < 0) | (row.ids >= teacher.vocabulary_size))[0])
        said = f"Id {row.ids[strange]} is not one of the model's {teacher.vocabulary_size}"
        row_audit.problems.append(RowProblem("not_in_vocabulary", said, max(0, strange - row.prompt_length)))
        row_audit.skip = "not_in_vocabulary"
    return row_audit.skip is None and row_audit.trained > 0


def _compute_logprobs(row: RolloutRow, teacher: Teacher, temperature: float) -> Floats:
    """Of the whole response; NaN for a token that nothing stands before."""
    found = np.full(len(row.mask), np.nan)
    positions = np.arange(max(1, row.prompt_length), len(row.ids), dtype=np.int64)
    if len(positions):
        scales = np.full(len(positions), temperature, np.float32)
        found[positions - row.prompt_length] = teacher.compute_logprobs(row.ids, positions, scales)
    return found


def _rank_severity(problem: RowProblem) -> int:
    return list(PROBLEM_KINDS).index(problem.kind)


def find_repeats(rows: Sequence[RolloutRow]) -> dict[int, RowProblem]:
    """By the numbers of rows that repeat an earlier one."""
    factors = np.random.default_rng(0).integers(0, 2**63, max((len(row.ids) for row in rows), default=0), np.uint64)
    first: dict[bytes, RolloutRow] = {}
    found: dict[int, RowProblem] = {}
    for row in rows:
        if not row.has_matching_lengths:
            continue
        positions = np.flatnonzero((row.mask == 1) & find_usable_logprobs(row))
        shared: dict[int, tuple[RolloutRow, list[int]]] = {}
        for position, key in zip(positions.tolist(), _hash_samplings(row, positions, factors), strict=True):
            earlier = first.setdefault(key, row)
            if earlier is not row:
                shared.setdefault(earlier.number, (earlier, []))[1].append(position)
        for other, same in shared.values():
            if row.number not in found and _is_same_sampling(row, other, same):
                said = f"{len(same)} of its tokens are trained in row {other.number} too, sampled once"
                found[row.number] = RowProblem(
                    "repeated", said, same[0], find_turn_number(same[0], split_turns(row.trained_positions))
                )
    return found


def _is_same_sampling(row: RolloutRow, other: RolloutRow, positions: list[int]) -> bool:
    assert row.logprobs is not None
    together = row.rollout is not None and row.rollout == other.rollout
    return together or float(row.logprobs[positions].sum()) < _MAX_CHANCE_LOGPROB


def _hash_samplings(row: RolloutRow, positions: NDArray[np.int64], factors: NDArray[np.uint64]) -> list[bytes]:
    """Of each token: a number for it and all that stands before it (a sum modulo 2**64), and its log-probability."""
    if row.logprobs is None:
        return []
    odd = factors[: len(row.ids)] * np.uint64(2) + np.uint64(1)
    prefixes = np.cumsum((row.ids.astype(np.uint64) + np.uint64(1)) * odd, dtype=np.uint64)[
        row.prompt_length + positions
    ]
    values = row.logprobs[positions].view(np.uint32).astype(np.uint64)
    return [pair.tobytes() for pair in np.stack([prefixes, values], axis=1)]
