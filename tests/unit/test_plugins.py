"""Plug-ins of packages that are really installed: a package and its dist-info on `sys.path`."""

import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar import plugins
from polar.errors import ConfigError
from polar.harnesses import find_by_command, find_call_patterns
from polar.plugins import PluginError, PluginKind, list_names, load, load_all

HARNESS = """
    from polar.harnesses.shell import Shell

    class Mine(Shell):
        name = "mine"
        executables = ("mine",)
"""


class Site:
    """A folder that packages are installed into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, package: str, code: str, entry_points: str, *, version: str = "1.0") -> None:
        module = package.replace("-", "_")
        (self.folder / f"{module}.py").write_text(textwrap.dedent(code))
        info = self.folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        plugins.clear_cache()

    def install_one(self, package: str, code: str, kind: PluginKind, name: str, attribute: str = "Mine") -> None:
        self.install(package, code, f"[polar.{kind}]\n{name} = {package.replace('-', '_')}:{attribute}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    known = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    plugins.clear_cache()
    yield Site(tmp_path)
    monkeypatch.undo()
    plugins.clear_cache()
    for module in set(sys.modules) - known:
        if (getattr(sys.modules[module], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[module]


def test_a_plug_in_that_works(site: Site) -> None:
    site.install_one("polar-mine", HARNESS, "harnesses", "mine")
    assert load("harnesses", "mine").name == "mine"
    assert "mine" in list_names("harnesses")
    assert find_by_command(["mine", "-p"]) == "mine"


BROKEN = [
    ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("def", "SyntaxError"),
    ("raise SystemExit(3)", "SystemExit: 3"),
    ("from polar.errors import ConfigError\nraise ConfigError('It needs\\n  a licence.')", "It needs a licence."),
    ("Other = 1", "AttributeError: module 'polar_broken' has no attribute 'Mine'"),
    ("Mine = 1", "1 is no class; harnesses are classes that have what polar.harnesses.base.Harness has."),
    (
        "class Mine:\n    name = executables = default_model = call_patterns = package = skills_folder = 1\n"
        "    def setup(self, request): ...",
        "it lacks build_command, log_paths, supports_mcp, which polar.harnesses.base.Harness has.",
    ),
]


@pytest.mark.parametrize(("code", "reason"), BROKEN, ids=[reason.partition(":")[0] for _, reason in BROKEN])
def test_one_that_can_not_be_used_is_named_and_left_out(
    site: Site, caplog: pytest.LogCaptureFixture, code: str, reason: str
) -> None:
    site.install_one("polar-broken", code, "harnesses", "broken")
    site.install_one("polar-mine", HARNESS, "harnesses", "mine")
    assert load("harnesses", "pi").name == "pi"
    with caplog.at_level(logging.WARNING):
        assert {"pi", "mine"} <= load_all("harnesses").keys()
        assert "broken" not in load_all("harnesses")
    (line,) = caplog.messages
    assert "\n" not in line
    named = "Left out: The plug-in 'broken' (polar.harnesses) of polar-broken 1.0 can't be used: polar_broken:Mine: "
    assert line.startswith(named + reason)
    for _ in range(2):
        with pytest.raises(PluginError) as error:
            load("harnesses", "broken")
        assert line == f"Left out: {error.value}"
    assert line == f"Left out: {plugins.list_problems()[0]}"


def test_what_does_not_use_it_goes_on(site: Site) -> None:
    for kind in plugins.PLUGIN_KINDS:
        site.install_one(f"polar-broken-{kind}", "import no_such_module", kind, "broken")
    assert find_by_command(["codex", "exec"]) == "codex"
    assert find_call_patterns(None) == find_call_patterns("unknown") == find_call_patterns("broken")
    for kind in plugins.PLUGIN_KINDS:
        assert load_all(kind).keys() == set(list_names(kind)) - {"broken"} != set()
    assert len(plugins.list_problems()) == len(plugins.PLUGIN_KINDS)


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        ("dialects", "create_stream_encoder, decode_reply, decode_request"),
        ("engines", "apply_sampling_defaults, close"),
        ("runtimes", "check_availability, check_image"),
        ("evaluators", "evaluate"),
        ("exporters", "feed, finish"),
    ],
)
def test_a_class_of_another_shape(site: Site, kind: PluginKind, lacks: str) -> None:
    site.install_one("polar-broken", "class Mine:\n    pass", kind, "broken")
    with pytest.raises(PluginError, match=f"it lacks {lacks}.*which polar"):
        load(kind, "broken")


def test_a_builder_is_a_function(site: Site) -> None:
    site.install_one("polar-broken", "Mine = 1", "builders", "broken")
    with pytest.raises(PluginError, match="1 is no function"):
        load("builders", "broken")


def test_of_two_with_one_name_polars_own_is_used(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.install_one("a-package", HARNESS, "harnesses", "pi")
    site.install_one("polar-one", HARNESS, "harnesses", "mine")
    site.install_one("polar-two", HARNESS, "harnesses", "mine")
    with caplog.at_level(logging.WARNING):
        assert load("harnesses", "pi").__module__ == "polar.harnesses.pi"
    assert load("harnesses", "mine").__module__ == "polar_one"
    assert [message.partition(" can't")[0] for message in caplog.messages] == [
        "Left out: The plug-in 'pi' (polar.harnesses) of a-package 1.0",
        "Left out: The plug-in 'mine' (polar.harnesses) of polar-two 1.0",
    ]
    assert "has a plug-in of that name, which is used instead." in caplog.messages[0]
    assert len(plugins.list_problems()) == 2


def test_an_older_name_of_the_distribution_is_no_conflict(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """An environment from before the distribution was renamed has both."""
    site.install("former-name", "", "[polar.harnesses]\npi = polar.harnesses.pi:Pi\n")
    assert load("harnesses", "pi").__module__ == "polar.harnesses.pi"
    assert (caplog.messages, plugins.list_problems()) == ([], [])


def test_entry_points_that_can_not_be_read(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.install("polar-broken", "", "[polar.harnesses]\nno equals sign\n")
    with caplog.at_level(logging.WARNING):
        assert load("harnesses", "pi").name == "pi"
    assert [message.partition(" can't")[0] for message in caplog.messages] == [
        f"Left out: The entry points of a package in {site.folder}"
    ]


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(ConfigError, match=r"Among the harnesses there is no 'nobodys'; known: aider, .*, shell\."):
        load("harnesses", "nobodys")


def test_commands_go_on_and_say_what_is_left_out(site: Site) -> None:
    site.install_one("polar-broken", "import no_such_module", "harnesses", "broken")
    code = f"import sys; sys.path.insert(0, {str(site.folder)!r}); from polar.cli.main import main; main()"

    def polar(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=site.folder, check=False)

    reason = "The plug-in 'broken' (polar.harnesses) of polar-broken 1.0 can't be used: polar_broken:Mine: "
    done = polar("harness", "list", "--cache", str(site.folder / "cache"), "--json")
    assert done.returncode == 0, done.stderr
    assert '"pi"' in done.stdout
    assert [line.count(reason) for line in done.stderr.splitlines()] == [1]
    done = polar("harness", "install", "--cache", str(site.folder / "cache"), "broken")
    assert done.returncode == 1
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
