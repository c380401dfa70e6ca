"""The contract of exporters, kept by those of Polar: a class for each format."""

from collections.abc import Iterable

from polar.plugins import list_names, load
from polar.testing import ExporterContract
from polar.testing.exporters import ExportedTrace
from tests.unit.export import reading


class _Format(ExporterContract):
    def read(self, data: bytes) -> Iterable[ExportedTrace]:
        known = self.plugin.name in reading.READERS
        return reading.read(self.plugin.name, data) if known else super().read(data)


for _name in list_names("exporters"):
    _members = {"plugin": load("exporters", _name), "__module__": __name__}
    _contract = type(f"Test_{_name.replace('-', '_')}", (_Format,), _members)
    globals()[_contract.__name__] = _contract
