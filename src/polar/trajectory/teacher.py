"""Teacher forcing: what a model says of the tokens that were sampled, against the log-probabilities that were recorded.

Traces are run in the order of their ids, and what one shares with the one before stays in the attention cache: that is
a walk over the token tree, depth first, so shared prefixes are computed once. All in fp32, with logits of the tokens
in question alone, some hundred at a time.

Raw log-probabilities are those of the model itself; processed ones are after the temperature. Where anything else
shaped the distribution (top-p, penalties, ...), or where a prompt holds images, there is nothing to compare with: such
tokens are counted as skipped, by reason.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from polar.distribution import install_hint
from polar.errors import ConfigError
from polar.records.exchange import Exchange
from polar.records.trajectory import Ids, Trace

_FORWARD_TOKENS = 512
"""Tokens in one forward pass."""
_TOKENS_BEFORE, _TOKENS_AFTER = 20, 4
"""How many tokens around the worst one are shown."""

_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "logit_bias": (None, {}),
}
"""Sampling parameters besides the temperature that change a distribution, and the values with which they don't."""


class LogprobConditions(Struct, frozen=True):
    """How the logits of an exchange became its log-probabilities: divided by `temperature`; or why nobody can say."""

    temperature: float = 1.0
    skip_reason: str | None = None


def logprob_conditions(exchange: Exchange, *, images: bool = False) -> LogprobConditions:
    if images:
        return LogprobConditions(skip_reason="images")
    if exchange.logprobs is None or exchange.logprob_kind == "none":
        return LogprobConditions(skip_reason="no_logprobs")
    if exchange.logprob_kind == "raw":
        return LogprobConditions()
    for name, neutral in _NEUTRAL_VALUES.items():
        if getattr(exchange.sampling, name) not in neutral:
            return LogprobConditions(skip_reason=name)
    return LogprobConditions(
        exchange.sampling.temperature or 1.0
    )  # at 0 the likeliest token is taken, and nothing is scaled


class LargestDifference(Struct):
    """The token whose recomputed log-probability is furthest from the recorded one, and what stands around it."""

    session_id: str
    exchange_id: str
    position: int  # among the exchange's sampled tokens
    policy_version: int
    recorded: float
    recomputed: float
    before: list[int]
    id: int
    after: list[int]


class LogprobComparison(Struct):
    """Recorded against recomputed, over all that was compared so far."""

    tokens: int = 0
    largest: float = 0.0
    total: float = 0.0
    worst: LargestDifference | None = None
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0


class _ScoredTokens(Struct):
    """The tokens of one trace whose log-probabilities are asked for. Arrays of one entry each."""

    trace: Trace
    ids: Ids  # prompt and response, whole
    positions: NDArray[np.int64]  # in `ids`
    temperatures: NDArray[np.float32]
    exchanges: list[tuple[str, int]]  # whose sampled token it is, and which


class Teacher:
    """A model in fp32, on a GPU if there is one. It remembers the last sequence that it has seen."""

    def __init__(self, model: Any, torch: Any) -> None:
        self._model = model
        self._torch = torch
        self._device = model.device
        self.vocabulary_size: int = model.get_input_embeddings().num_embeddings
        self.num_computed_tokens = 0  # tokens that went through the model
        self._cache: Any = None
        self._cached_ids: Ids = np.empty(0, np.int32)
        # Plain attention can forget the end of a sequence and take up from there. What keeps a running state or a
        # window can't: such a model reads each trace whole.
        self._forward(np.zeros(2, np.int32), np.zeros(1, np.int64))
        self._can_crop_cache = all(
            type(layer).__name__ == "DynamicLayer" for layer in getattr(self._cache, "layers", [None])
        )
        self._crop_cache(0)

    @classmethod
    def load(cls, folder: Path) -> "Teacher":
        """From local files alone."""
        try:
            torch, transformers = import_module("torch"), import_module("transformers")
        except ImportError as error:
            raise ConfigError(
                f"Recomputing log-probabilities needs torch and transformers ({error}): {install_hint('verify')}."
            ) from error
        if not (folder / "config.json").exists():
            raise ConfigError(f"There is no model in {folder}: it would have a config.json.")
        transformers.utils.logging.disable_progress_bar()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ConfigError(f"The model in {folder} can't be loaded: {error}.") from error
        return cls(model.to(device).eval(), torch)

    def compare(
        self,
        traces: Iterable[Trace],
        conditions_by_exchange: Mapping[str, LogprobConditions],
        into: LogprobComparison,
        *,
        policy_version: int | None = None,
    ) -> None:
        """Adds to `into`. `known` has the conditions of every exchange; `version`: only what that policy sampled."""
        wanted = [self._select_tokens(trace, conditions_by_exchange, into, policy_version) for trace in traces]
        for it in sorted(wanted, key=lambda it: it.ids.astype(">i4").tobytes()):
            if len(it.positions):
                _add_differences(it, self.logprobs(it.ids, it.positions, it.temperatures), into)

    def _select_tokens(
        self,
        trace: Trace,
        conditions_by_exchange: Mapping[str, LogprobConditions],
        into: LogprobComparison,
        policy_version: int | None,
    ) -> _ScoredTokens:
        ids = np.concatenate((trace.prompt_ids, trace.response_ids))
        edge = len(trace.prompt_ids)
        strange = bool(len(ids)) and (int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary_size)
        positions: list[int] = []
        temperatures: list[float] = []
        exchanges: list[tuple[str, int]] = []
        for span in trace.spans:
            how = conditions_by_exchange[span.exchange_id]
            for at in range(span.start, span.stop):
                skip = how.skip_reason
                if policy_version is not None and trace.policy_versions[at] != policy_version:
                    skip = "other_version"
                elif strange:
                    skip = "not_in_vocabulary"
                elif edge + at == 0:
                    skip = "no_context"
                if skip is not None:
                    into.skipped[skip] += 1
                    continue
                positions.append(edge + at)
                temperatures.append(how.temperature)
                exchanges.append((span.exchange_id, span.offset + at - span.start))
        return _ScoredTokens(trace, ids, np.array(positions, np.int64), np.array(temperatures, np.float32), exchanges)

    def logprobs(
        self, ids: Ids, positions: NDArray[np.int64], temperatures: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Of the tokens at some positions (ascending, none of them the first), each given all that stands before it."""
        torch = self._torch
        places = positions - 1  # a token's logits stand at the one before it
        start = min(_common_prefix_length(self._cached_ids, ids), int(places[0])) if self._can_crop_cache else 0
        self._crop_cache(start)
        end = int(places[-1]) + 1
        found = []
        while start < end:
            stop = min(start + _FORWARD_TOKENS, end) if self._can_crop_cache else end
            here = (places >= start) & (places < stop)
            logits = self._forward(ids[start:stop], places[here] - start)
            if here.any():
                scale = torch.from_numpy(temperatures[here]).to(self._device)[:, None]
                picked = torch.from_numpy(ids[positions[here]].astype(np.int64)).to(self._device)[:, None]
                found.append(torch.log_softmax(logits / scale, -1).gather(1, picked)[:, 0].cpu().numpy())
            start = stop
        self._cached_ids = ids[:end]
        return np.concatenate(found)

    def _forward(self, ids: Ids, keep: NDArray[np.int64]) -> Any:
        """Goes on from what the cache holds; logits at the places to keep."""
        torch = self._torch
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(self._device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=torch.from_numpy(keep).to(self._device) if len(keep) else 1,
            )
        self._cache = getattr(out, "past_key_values", None)
        self.num_computed_tokens += len(ids)
        return out.logits[0].float()

    def _crop_cache(self, length: int) -> None:
        """All behind the first `length` tokens."""
        if not length:
            self._cache = None
        elif (gone := len(self._cached_ids) - length) > 0:
            self._cache.crop(-gone)
        self._cached_ids = self._cached_ids[:length]


def _add_differences(wanted: _ScoredTokens, recomputed: NDArray[np.float32], into: LogprobComparison) -> None:
    trace, edge = wanted.trace, len(wanted.trace.prompt_ids)
    assert trace.logprobs is not None  # what has none is skipped
    recorded = trace.logprobs[wanted.positions - edge]
    differences = np.abs(recorded.astype(np.float64) - recomputed)
    differences[np.isnan(differences)] = math.inf
    into.tokens += len(differences)
    into.total += float(differences.sum())
    at = int(differences.argmax())
    if into.worst is not None and differences[at] <= into.largest:
        return
    place = int(wanted.positions[at])
    exchange_id, position = wanted.exchanges[at]
    into.largest = float(differences[at])
    into.worst = LargestDifference(
        session_id=trace.session_id,
        exchange_id=exchange_id,
        position=position,
        policy_version=int(trace.policy_versions[place - edge]),
        recorded=float(recorded[at]),
        recomputed=float(recomputed[at]),
        before=wanted.ids[max(0, place - _TOKENS_BEFORE) : place].tolist(),
        id=int(wanted.ids[place]),
        after=wanted.ids[place + 1 : place + 1 + _TOKENS_AFTER].tolist(),
    )


def _common_prefix_length(a: Ids, b: Ids) -> int:
    """How many leading ids are equal."""
    length = min(len(a), len(b))
    unequal = np.flatnonzero(a[:length] != b[:length])
    return int(unequal[0]) if len(unequal) else length
