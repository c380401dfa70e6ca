"""Harbor's task folders as tasks of ours."""

from pathlib import Path
from typing import Any

import pytest

from polar.errors import ConfigError
from polar.records.task import Exec, TaskRequest, UploadFile
from polar.tasks import read

# As `harbor init` and the tasks of Terminal-Bench have it, with every field that we know.
WHOLE = """
schema_version = "1.1"
source = "somewhere"

[task]
name = "org/greet"
authors = [{ name = "A", email = "a@example.com" }]

[metadata]
difficulty = "easy"
made = 2025-03-01

[verifier]
timeout_sec = 120.0
env = { KEY = "${POLAR_TEST_KEY}", OTHER = "${POLAR_TEST_NONE:-else}/x", PLAIN = "$x" }

[agent]
timeout_sec = 900

[environment]
build_timeout_sec = 30.0
cpus = 2
memory_mb = 4096
storage_mb = 10240
gpus = 0
allow_internet = false
env = { MODE = "test" }
mcp_servers = [{ name = "files", transport = "streamable-http", url = "http://files:80/mcp" }]

[solution]
env = {}
"""
DOCKERFILE = "FROM debian:12\nENV A=1\nWORKDIR /srv\nCOPY data.txt .\nRUN make\n"


def folder(tmp_path: Path, toml: str = "", dockerfile: str = DOCKERFILE) -> Path:
    task = tmp_path / "greet"
    for name, text in {
        "task.toml": toml,
        "instruction.md": "Greet.\n",
        "tests/test.sh": "true",
        "environment/data.txt": "",
        "environment/Dockerfile": dockerfile,
    }.items():
        path = task / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return task


def one(path: Path, **keywords: Any) -> TaskRequest:
    (task,) = read([path], **keywords)
    return task


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_TEST_KEY", "k")


@pytest.mark.parametrize("backend", [None, "docker", "podman"])
def test_an_image_is_built_where_that_can_be_done(tmp_path: Path, backend: str | None) -> None:
    path = folder(tmp_path, WHOLE)
    task = one(path, backend=backend)
    assert task.task_id == "greet"
    assert task.instruction == "Greet.\n"
    assert task.timeout_seconds == 900
    assert task.runtime.backend == (backend or "docker")
    assert task.runtime.image == f"build:{path / 'environment'}"
    assert task.runtime.prepare == []
    assert task.runtime.workdir == "/srv"
    assert task.runtime.env == {"MODE": "test"}, "the image's own variables are the image's"
    assert (task.runtime.cpus, task.runtime.memory_mb, task.runtime.disk_mb) == (2, 4096, 10240)
    assert task.runtime.effective_network == "gateway"
    assert [(server.name, server.transport) for server in task.agent.mcp_servers] == [("files", "http")]
    assert task.evaluator is not None
    assert task.evaluator.strategy == "harbor"
    assert task.evaluator.config == {"tests": str(path / "tests"), "timeout_seconds": 120}
    assert task.evaluator.env == {"KEY": "k", "OTHER": "else/x", "PLAIN": "$x"}
    assert task.metadata["harbor"]["task"]["name"] == "org/greet"
    assert task.metadata["harbor"]["metadata"] == {"difficulty": "easy", "made": "2025-03-01"}
    assert task.metadata["harbor"]["verifier"]["env"]["KEY"] == "${POLAR_TEST_KEY}"


def test_a_sandbox_without_images_follows_the_dockerfile(tmp_path: Path) -> None:
    path = folder(tmp_path, WHOLE)
    task = one(path, backend="bubblewrap")
    assert task.runtime.image is None
    assert task.runtime.workdir == "/srv"
    assert task.runtime.env == {"A": "1", "MODE": "test"}
    assert task.runtime.prepare == [
        Exec(type="exec", command=["mkdir", "-p", "/srv"], cwd="/", timeout_seconds=30),
        UploadFile(type="upload_file", source=str(path / "environment" / "data.txt"), target="/srv/data.txt"),
        Exec(type="exec", command=["/bin/sh", "-c", "make"], cwd="/srv", env={"A": "1"}, timeout_seconds=30),
    ]


def test_an_empty_task_toml_is_enough(tmp_path: Path) -> None:
    task = one(folder(tmp_path, dockerfile="FROM debian"))
    assert task.runtime.workdir == "/app"
    assert (task.runtime.cpus, task.runtime.memory_mb, task.runtime.disk_mb) == (None, None, None)
    assert task.timeout_seconds == TaskRequest(task_id="x", instruction="x").timeout_seconds
    assert task.runtime.effective_network == "gateway", "the internet is never a default"


def test_the_file_may_be_named_instead_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path, WHOLE)
    assert one(path / "task.toml") == one(path)
    monkeypatch.chdir(path)
    assert one(Path()) == one(path)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"memory": '"2G"', "storage": '"512M"'}, (2048, 512)),
        ({"memory": '"1.5g"', "storage": '"2048K"'}, (1536, 2)),
        ({"memory_mb": "100"}, (100, None)),
    ],
)
def test_sizes_of_schema_1_0(tmp_path: Path, environment: dict[str, str], expected: tuple[int, int | None]) -> None:
    lines = "\n".join(f"{name} = {value}" for name, value in environment.items())
    task = one(folder(tmp_path, f'version = "1.0"\n[environment]\n{lines}'))
    assert (task.runtime.memory_mb, task.runtime.disk_mb) == expected


@pytest.mark.parametrize(
    ("toml", "docker"),
    [
        ("[environment]\nallow_internet = true", "internet"),
        ('[environment]\nnetwork_mode = "public"', "internet"),
        ('[environment]\nallow_internet = true\nnetwork_mode = "no-network"', "gateway"),
        ('[environment]\nallow_internet = true\n[agent]\nnetwork_mode = "no-network"', "gateway"),
        ("[environment]\nallow_internet = false", "gateway"),
    ],
)
def test_the_internet_where_a_task_asks_for_it(tmp_path: Path, toml: str, docker: str) -> None:
    """But never in bubblewrap, where it would be the machine's own network."""
    path = folder(tmp_path, toml)
    assert one(path).runtime.effective_network == docker
    assert one(path, backend="bubblewrap").runtime.effective_network == "gateway"


def test_an_image_that_is_there_already(tmp_path: Path) -> None:
    path = folder(tmp_path, '[environment]\ndocker_image = "example/greet:1"\nworkdir = "/data"')
    assert (one(path).runtime.image, one(path).runtime.workdir) == ("example/greet:1", "/data")
    (path / "environment" / "Dockerfile").unlink()
    assert one(path).runtime.image == "example/greet:1"
    with pytest.raises(
        ConfigError, match=r"task\.toml: environment: there is no environment/Dockerfile for bubblewrap"
    ):
        read([path], backend="bubblewrap")


def test_fields_that_nobody_knows_are_kept(tmp_path: Path) -> None:
    task = one(folder(tmp_path, 'new = 1\n[environment]\ncolour = "red"\n[verifier]\nx = []\n'))
    assert task.metadata["harbor"] == {"new": 1, "environment": {"colour": "red"}, "verifier": {"x": []}}


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('version = "2.0"', "schema_version: 2.0 is not known"),
        ("[[steps]]\nname = 'one'", "steps: tasks of several steps"),
        ("[environment]\ngpus = 1", "environment.gpus: a runtime has no GPU"),
        ("[environment]\nos = 'windows'", "environment.os: windows"),
        ("[environment]\nhealthcheck.command = 'true'", "environment.healthcheck: "),
        ("[environment]\nskills_dir = '/skills'", "environment.skills_dir: "),
        ("[environment]\nallowed_hosts = ['a']", "environment.network_mode: "),
        ("[agent]\nnetwork_mode = 'allowlist'", "agent.network_mode: "),
        ("[verifier]\nenvironment_mode = 'separate'", "verifier.environment: "),
        ("[verifier]\nuser = 'nobody'", "verifier.user: 'nobody'"),
        ("[agent]\nuser = 1000", "agent.user: 1000"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec: input should be greater than 0"),
        ("[environment]\nmemory = '2 cups'", "environment.memory: '2 cups' is no size: write 512M or 2G"),
        (f"[environment]\nmemory = '{'9' * 400}G'", f"environment.memory: '{'9' * 40}' is more than any machine has"),
        ("[environment]\ncpus = 'two'\nenv = 3", "environment.cpus: input should be a valid number, unable to parse"),
        (
            "[environment]\nenv = { A = '${POLAR_TEST_NONE}' }",
            "environment.env: the variable POLAR_TEST_NONE is not set",
        ),
        ("[environment]\nmcp_servers = [{ name = 'x' }]", "agent.mcp_servers[0]: it takes either `command` or `url`"),
        ("x = ", "this is not valid TOML"),
    ],
)
def test_what_can_not_be_run_is_named(tmp_path: Path, toml: str, message: str) -> None:
    path = folder(tmp_path, toml)
    with pytest.raises(ConfigError) as caught:
        read([path])
    assert str(caught.value).startswith(f"{path / 'task.toml'}: {message}")


@pytest.mark.parametrize("name", ["docker-compose.yaml", "docker-compose.yml"])
def test_several_containers_are_refused(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path)
    (path / "environment" / name).write_text("services: {}")
    with pytest.raises(ConfigError, match=rf"task\.toml: environment/{name}: several containers"):
        read([path])


def test_the_parts_of_a_folder_must_be_there(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "environment" / "Dockerfile").rename(path / "Dockerfile")
    with pytest.raises(ConfigError, match=r"there is no environment/Dockerfile for docker"):
        read([path])
    (path / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"task\.toml: tests: there is no tests/test\.sh"):
        read([path])
    with pytest.raises(ConfigError, match="needs a root of its own, which local has not"):
        read([path], backend="local")
    (path / "tests" / "test.sh").touch()
    (path / "instruction.md").unlink()
    with pytest.raises(ConfigError, match=r"greet/instruction\.md: it can't be read: No such file"):
        read([path])


def test_a_broken_dockerfile_is_named_with_its_line(tmp_path: Path) -> None:
    path = folder(tmp_path, dockerfile="FROM a\nRUN x\nFROM b\n")
    assert one(path).runtime.image is not None
    with pytest.raises(ConfigError) as caught:
        read([path], backend="bubblewrap")
    assert str(caught.value).startswith(f"{path / 'environment' / 'Dockerfile'}: line 3: FROM: several stages")


def test_what_counts_in_system_folders(tmp_path: Path) -> None:
    path = folder(tmp_path, '[metadata.polar]\nsystem_paths = ["/var/www"]\n')
    (path / "instruction.md").write_text(
        "Correct `/etc/app.conf`, and /opt/app/run.d/ (see /usr/share/doc/x). Use /opt/tool/bin/tool, /srv/x,\n"
        "a/etc/b, http://host/etc/c, and write /tmp/out.txt.\n"
    )
    evaluator = one(path).evaluator
    assert evaluator is not None
    assert evaluator.config["system_paths"] == ["/var/www", "/etc/app.conf", "/opt/app/run.d", "/tmp/out.txt"]
    other = one(folder(tmp_path / "other")).evaluator
    assert other is not None
    assert "system_paths" not in other.config
