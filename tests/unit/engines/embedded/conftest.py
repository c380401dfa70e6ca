from pathlib import Path

import pytest

from tests.unit.engines.embedded import tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    return tiny.make_model_folder(tmp_path_factory.mktemp("model") / "tiny")
