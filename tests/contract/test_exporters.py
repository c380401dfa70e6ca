"""The contract of exporters, kept by those of Polar: a class for each format."""

from collections.abc import Iterable, Sequence

from polar.export.base import SessionItem
from polar.plugins import list_names, load
from polar.records.exchange import Logprobs, TokenIds
from polar.testing import ExporterContract
from polar.testing.exporters import ExportedTrace
from tests.unit.export import reading

TEXT = frozenset({"sft", "preference", "huggingface"})
"""Formats of messages."""


class _Format(ExporterContract):
    def read(self, data: bytes) -> Iterable[ExportedTrace]:
        return reading.read(self.plugin.name, data)


class _Labels(_Format):
    """Traces without log-probabilities."""

    def expect(self, item: SessionItem) -> Iterable[ExportedTrace]:
        return (trace._replace(logprobs=None) for trace in super().expect(item))


class _Paths(_Format):
    """What each call trains, by itself."""

    def expect(self, item: SessionItem) -> Iterable[ExportedTrace]:
        for path in item.session_paths.paths:
            if count := path.num_trainable:
                logprobs = None if path.logprobs is None else path.logprobs[:count]
                yield _call(path.prompt, path.sampled[:count], logprobs, item.session_paths.reward)


class _Calls(_Format):
    """Each call as it was recorded, whether it trains or not."""

    def expect(self, item: SessionItem) -> Iterable[ExportedTrace]:
        for exchange in item.exchanges:
            assert exchange.prompt_ids is not None
            assert exchange.sampled_ids is not None
            yield _call(exchange.prompt_ids, exchange.sampled_ids, exchange.logprobs, item.session_paths.reward)


def _call(prompt: TokenIds, sampled: TokenIds, logprobs: Logprobs | None, reward: float | None) -> ExportedTrace:
    known: Sequence[float] | None = None if logprobs is None else [0.0] * len(prompt) + logprobs.tolist()
    mask = [0] * len(prompt) + [1] * len(sampled)
    return ExportedTrace.make([*prompt.tolist(), *sampled.tolist()], mask, known, reward)


_BASES: dict[str, type[_Format]] = {"sft-tokens": _Labels, "tree": _Paths, "atif": _Calls}

for _name in list_names("exporters"):
    _members = {"plugin": load("exporters", _name), "keeps_tokens": _name not in TEXT, "__module__": __name__}
    _contract = type(f"Test_{_name.replace('-', '_')}", (_BASES.get(_name, _Format),), _members)
    globals()[_contract.__name__] = _contract
