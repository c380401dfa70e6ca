"""The contract of every harness preset:

    class TestMine(HarnessContract):
        plugin = Mine

The harness itself runs only if `runs_here` is true, which means that its program is installed on this machine. It then
gets one instruction and talks to a gateway in front of a scripted engine.
"""

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import pytest
import yaml

from polar.errors import ConfigError
from polar.harnesses import build_environment, filter_environment, find_by_command
from polar.harnesses.base import CallPatterns, Harness, HarnessSetup, Package, SetupRequest, write_setup
from polar.records.task import McpServer
from polar.testing.contract import Contract, assert_helpful, requires
from polar.testing.gateway import LoopbackGateway

URL, KEY, HOME = "http://10.0.0.1:1234", "sk-polar-0123456789abcdefghijklmnop", "/somewhere/home"
STDIO_SERVER = McpServer(name="my tools", command="/opt/serve", args=["--port", 'a "b"\n\x7f🙂'], env={"WORD": "te=al"})
REMOTE_SERVER = McpServer(name="remote", url="http://10.0.0.2/mcp", headers={"x-word": "teal"})
INSTRUCTION = "Mend it:\n- 'quoted' \"words\" and $HOME"
_RUN_SECONDS = 300.0


class HarnessContract(Contract):
    kind = "harnesses"
    settings: ClassVar[Mapping[str, Any]] = {}  # required settings
    is_shell_command: ClassVar[bool] = False  # the command is a shell line that contains the quoted instruction
    runs_here: ClassVar[bool] = False

    def make_harness(self) -> Harness:
        made: Harness = self.plugin()
        return made

    def make_request(self, *servers: McpServer, model: str = "a-model", **settings: Any) -> SetupRequest:
        return SetupRequest(HOME, "/somewhere/work", URL, KEY, model, servers, {**self.settings, **settings})

    def make_setup(self) -> HarnessSetup:
        """A setup that uses every feature of the harness."""
        servers = (STDIO_SERVER, REMOTE_SERVER) if self.make_harness().supports_mcp else ()
        return self.make_harness().setup(self.make_request(*servers))

    def test_what_it_says_of_itself(self) -> None:
        harness = self.make_harness()
        assert harness.name
        assert harness.default_model
        assert isinstance(harness.executables, tuple)
        assert isinstance(harness.supports_mcp, bool)
        assert harness.package is None or isinstance(harness.package, Package)
        assert isinstance(harness.call_patterns, CallPatterns)
        patterns = harness.call_patterns
        headers = [
            *patterns.agent_headers,
            *patterns.subagent_headers,
            *(pattern.header for pattern in patterns.role_patterns),
        ]
        assert all(header is None or header == header.lower() for header in headers)

    def test_it_is_found_by_its_command(self) -> None:
        for executable in self.make_harness().executables:
            assert find_by_command([f"/opt/bin/{executable}", "x"]) == self.make_harness().name

    def test_it_points_at_the_gateway(self) -> None:
        setup = self.make_harness().setup(self.make_request())
        variables = build_environment(URL, KEY, "a-model") | setup.env
        written = "\n".join([*variables.values(), *setup.files.values()])
        assert URL in written
        assert "a-model" in written
        assert KEY in variables.values()

    def test_it_writes_nothing_itself_and_is_always_the_same(self) -> None:
        assert self.make_setup() == self.make_setup()
        assert not Path("/somewhere").exists()

    def test_files_can_be_read_and_lie_below_the_home(self) -> None:
        setup, harness = self.make_setup(), self.make_harness()
        parse_config_files(setup)
        for path in setup.files:
            assert not path.startswith("/")
            assert ".." not in PurePosixPath(path).parts
        for path in (*harness.log_paths, *filter(None, [harness.skills_folder])):
            assert not path.startswith("/")

    def test_the_key_is_in_no_file_and_nothing_is_of_this_machine(self) -> None:
        setup = self.make_setup()
        for content in setup.files.values():
            assert KEY not in content
            for machine_path in (str(Path.home()) + "/", os.getcwd()):
                assert machine_path not in content
        for variable, value in setup.env.items():
            if "/" in value and not value.startswith("http") and not value.startswith("openai/"):
                assert value.startswith(HOME), variable  # nothing leads to the user's own files

    def test_a_strange_model_name_breaks_no_file(self) -> None:
        parse_config_files(self.make_harness().setup(self.make_request(model='org/"quoted"\\ 🙂')))

    def test_unknown_settings_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="tempo") as error:
            self.make_harness().setup(self.make_request(tempo=1))
        assert_helpful(error.value)
        with pytest.raises(ConfigError, match="tempo") as error:
            self.make_harness().build_command(INSTRUCTION, {**self.settings, "tempo": 1})
        assert_helpful(error.value)

    def test_the_command_holds_the_instruction(self) -> None:
        harness = self.make_harness()
        argv = harness.build_command(INSTRUCTION, dict(self.settings))
        assert all(isinstance(word, str) for word in argv)
        if harness.package is not None:
            assert argv[0] == harness.package.executable
        if not self.is_shell_command:
            assert " ".join(argv).endswith(INSTRUCTION)
            assert not any("tee" in word.split() or "||" in word for word in argv[:-1])
        assert argv == harness.build_command(INSTRUCTION, dict(self.settings))

    @requires("runs_here")
    def test_it_talks_to_the_gateway(self, tmp_path: Path) -> None:
        harness = self.make_harness()
        home, workdir = tmp_path / "home", tmp_path / "work"
        home.mkdir()
        workdir.mkdir()
        with LoopbackGateway.open(tmp_path / "data", "Done.") as gateway:
            model = harness.default_model
            request = SetupRequest(str(home), str(workdir), gateway.url, gateway.key, model, (), dict(self.settings))
            setup = harness.setup(request)
            write_setup(setup, home)
            variables = filter_environment(os.environ) | build_environment(gateway.url, gateway.key, model)
            argv = harness.build_command("Say that you are done.", dict(self.settings))
            assert shutil.which(argv[0]), f"{argv[0]} is not on PATH"
            completed = subprocess.run(
                argv,
                env=variables | {"HOME": str(home)} | setup.env,
                cwd=workdir,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_RUN_SECONDS,
                check=False,
            )
            assert completed.returncode == 0, completed.stderr
            exchanges = gateway.exchanges()
        assert [exchange.status for exchange in exchanges] == ["complete"] * len(exchanges) != []


def parse_config_files(setup: HarnessSetup) -> dict[str, Any]:
    """Every config file whose format has a parser, by path; scripts are compiled."""
    parsed = {}
    for path, content in setup.files.items():
        suffix = PurePosixPath(path).suffix
        if suffix == ".py":
            compile(content, path, "exec")
        elif suffix in _PARSERS:
            parsed[path] = _PARSERS[suffix](content)
    return parsed


_PARSERS: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads, ".yaml": yaml.safe_load}
