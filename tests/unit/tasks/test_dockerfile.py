"""Dockerfiles as steps: what Docker would have built, or an error that says which line can't be followed."""

from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.tasks.dockerfile import DockerfileSteps, find_last_workdir


@pytest.fixture
def context(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.txt", "c.md", "src/main.py", "src/lib/util.py", "with space.txt", "x.tar.gz"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def translated(context: Path, text: str) -> DockerfileSteps:
    return DockerfileSteps("FROM debian\n" + text, context, 60)


def steps(context: Path, text: str) -> list[tuple[str, ...]]:
    """Steps in short: what is put where, and what is run where."""
    found: list[tuple[str, ...]] = []
    for step in translated(context, text).steps:
        if step["type"] == "exec":
            assert step["timeout_seconds"] == 60
            found.append((step["cwd"], *step["command"]))
        else:
            source = step.get("source")
            named = step["content"] if source is None else str(Path(source).relative_to(context))
            found.append((step["type"], named, step["target"]))
    return found


def run(command: str, cwd: str = "/") -> tuple[str, ...]:
    return (cwd, "/bin/sh", "-c", command)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RUN make all", [run("make all")]),
        ("run make", [run("make")]),
        ('RUN ["make", "all in one"]', [("/", "make", "all in one")]),
        ("RUN [ -f x ]", [run("[ -f x ]")]),
        ("RUN a && \\\n    b \\\n\n  # not this\n    && c\nRUN d", [run("a &&     b     && c"), run("d")]),
        ("RUN echo \\\\", [run("echo \\")]),
        ("RUN echo '$HOME' \"$X\"", [run("echo '$HOME' \"$X\"")]),
        ("RUN --mount=type=cache,target=/c --network=none a", [run("a")]),
        ("RUN <<END\na\n# b\n  c\nEND\nRUN d", [run("a\n# b\n  c\n"), run("d")]),
        ("RUN python3 <<'E' && b\nprint(1)\nE", [run("python3 <<'E' && b\nprint(1)\nE")]),
        ("RUN echo 'a <<END b'\nRUN d", [run("echo 'a <<END b'"), run("d")]),
        ("RUN cat <<<word; echo $((1<<n))", [run("cat <<<word; echo $((1<<n))")]),
        ('SHELL ["bash", "-o", "pipefail", "-c"]\nRUN a', [("/", "bash", "-o", "pipefail", "-c", "a")]),
        ("WORKDIR /app\nRUN a\nWORKDIR sub/../in\nRUN b", [
            ("/", "mkdir", "-p", "/app"),
            run("a", "/app"),
            ("/", "mkdir", "-p", "/app/in"),
            run("b", "/app/in"),
        ]),
    ],
)  # fmt: skip
def test_commands(context: Path, text: str, expected: list[tuple[str, ...]]) -> None:
    assert steps(context, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("COPY a.txt /b", [("upload_file", "a.txt", "/b")]),
        ("COPY a.txt /b/", [("upload_file", "a.txt", "/b/a.txt")]),
        ("COPY a.txt /opt", [("upload_file", "a.txt", "/opt/a.txt")]),
        ("COPY a.txt b.txt /b", [("upload_file", "a.txt", "/b/a.txt"), ("upload_file", "b.txt", "/b/b.txt")]),
        ("COPY *.txt /b/", [(*("upload_file", name), f"/b/{name}") for name in ("a.txt", "b.txt", "with space.txt")]),
        ("COPY ?.txt /b/", [("upload_file", "a.txt", "/b/a.txt"), ("upload_file", "b.txt", "/b/b.txt")]),
        ("COPY src /b", [("upload_dir", "src", "/b")]),
        ("COPY src/ /b\nCOPY a.txt /b", [("upload_dir", "src", "/b"), ("upload_file", "a.txt", "/b/a.txt")]),
        ("COPY s*/l* /b/", [("upload_dir", "src/lib", "/b")]),
        ("COPY . /b", [("upload_dir", ".", "/b")]),
        ("COPY /../a.txt /b", [("upload_file", "a.txt", "/b")]),
        ('COPY ["with space.txt", "/b c"]', [("upload_file", "with space.txt", "/b c")]),
        ('COPY "with space.txt" /b\\ c', [("upload_file", "with space.txt", "/b c")]),
        ("ADD a.txt /b", [("upload_file", "a.txt", "/b")]),
        ("COPY --chown=1:1 --link a.txt /b", [("upload_file", "a.txt", "/b")]),
        ("COPY --chmod=755 a.txt /b", [("upload_file", "a.txt", "/b"), ("/", "chmod", "-R", "755", "/b")]),
        ("ARG n=a\nENV to=/b\nCOPY $n.txt ${to}/c", [("upload_file", "a.txt", "/b/c")]),
        ('ENV to=/b\r\nCOPY ["a.txt", "$to"]\r\n', [("upload_file", "a.txt", "/b")]),
        ("COPY <<END /b\nx $PATH\n\nEND", [
            ("upload_file", "x /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n\n", "/b"),
        ]),
        ("COPY <<'one' <<-two /b/\n$x\none\n\ty\n\ttwo\n", [
            ("upload_file", "$x\n", "/b/one"),
            ("upload_file", "y\n", "/b/two"),
        ]),
    ],
)  # fmt: skip
def test_files(context: Path, text: str, expected: list[tuple[str, ...]]) -> None:
    assert steps(context, text) == expected


def test_files_into_the_folder_that_one_works_in(context: Path) -> None:
    made = [("/", "mkdir", "-p", "/app")]
    for target in (".", "./", "/app", "/app/"):
        copied = steps(context, f"WORKDIR /app\nCOPY a.txt {target}")
        assert copied == [*made, ("upload_file", "a.txt", "/app/a.txt")]
    assert steps(context, "WORKDIR /app\nCOPY a.txt b") == [*made, ("upload_file", "a.txt", "/app/b")]


@pytest.mark.parametrize(
    ("text", "env"),
    [
        ("ENV a=1 b='2 3' c=\"4 5\" d=6\\ 7", {"a": "1", "b": "2 3", "c": "4 5", "d": "6 7"}),
        ("ENV a 1  2", {"a": "1  2"}),
        ("ENV a=1\nENV b=$a-${a}2 c=${x:-else} d=${a:+then} e=${x:+no} f='$a' g=\"$a b\" h=\\$a i=$x", {
            "a": "1", "b": "1-12", "c": "else", "d": "then", "e": "", "f": "$a", "g": "1 b", "h": "$a", "i": "",
        }),
        ("ENV a=\"x y\"\nENV b=$a", {"a": "x y", "b": "x y"}),
        ("ENV PATH=/opt/bin:$PATH", {"PATH": "/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}),
        ("ARG a=1\nARG b\nENV c=$a$b", {"c": "1"}),
        ("ENV a=1 \\\n    b=2", {"a": "1", "b": "2"}),
        ("ENV a", None),
        ("ENV =a", None),
    ],
)  # fmt: skip
def test_variables(context: Path, text: str, env: dict[str, str] | None) -> None:
    if env is None:
        with pytest.raises(ConfigError, match=r"line \d: ENV: .*NAME=VALUE"):
            translated(context, text)
    else:
        assert translated(context, text).env == env


def test_a_command_sees_the_variables_that_stand_before_it(context: Path) -> None:
    found = translated(context, "ENV a=1\nARG b=2\nRUN x\nENV c=3\nRUN y").steps
    assert [step["env"] for step in found] == [{"a": "1", "b": "2"}, {"a": "1", "b": "2", "c": "3"}]


def test_what_only_says_how_it_is_run_is_left_out(context: Path) -> None:
    text = 'CMD x\nENTRYPOINT ["y"]\nEXPOSE 80\nLABEL a=b\nUSER root\nUSER 0:0\nVOLUME /d\nHEALTHCHECK NONE'
    whole = DockerfileSteps(
        f"# syntax=docker/dockerfile:1\n# escape=\\\nARG v=12\n\nFROM debian:$v AS base\n{text}", context, 1
    )
    assert (whole.steps, whole.env, whole.workdir, whole.base) == ([], {}, None, "debian:12")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM debian", "line 2: FROM: several stages"),
        ("\nCOPY --from=0 /a /b", "line 3: COPY: --from can't be followed"),
        ("ADD https://example.com/x /x", "line 2: ADD: https://example.com/x is a download"),
        ("ADD git@example.com:a/b /x", "line 2: ADD: git@example.com:a/b is a download"),
        ("ADD x.tar.gz /x", "line 2: ADD: x.tar.gz would be unpacked"),
        ('ADD ["x.tar.gz", "/x"]', "line 2: ADD: x.tar.gz would be unpacked"),
        ('COPY "<<END" /x', "line 2: COPY: there is no <<END in "),
        ("COPY none /x", "line 2: COPY: there is no none in "),
        ("COPY *.none /x", "line 2: COPY: there is no "),
        ("COPY a** /x", "line 2: COPY: a** is no pattern"),
        (f"COPY {'x' * 5000} /x", "line 2: COPY: there is no xxx"),
        ("COPY a.txt", "line 2: COPY: it takes sources and a target"),
        ("USER nobody", "line 2: USER: nobody: only root"),
        ("RUN --mount=type=secret,id=k cat k", "line 2: RUN: --mount can't be followed"),
        ("RUN --mount=type=bind,source=a --mount=type=cache,target=/c x", "line 2: RUN: --mount can't be followed"),
        ("RUN --security=insecure x", "line 2: RUN: --security can't be followed"),
        ("RUN <<END\nx", "line 2: the here-document END has no end"),
        ("RUN <<END\n#!/bin/python3\nEND", "line 2: RUN: a here-document that names its own program"),
        ("SHELL bash", "line 2: SHELL: this takes a list"),
        ("RUNN x", "line 2: there is no instruction 'RUNN'"),
    ],
)
def test_what_can_not_be_followed(context: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translated(context, text)
    assert str(caught.value).startswith(message)


def test_files_that_docker_would_leave_out(context: Path) -> None:
    (context / ".dockerignore").write_text("*.txt")
    assert steps(context, "COPY a.txt /b") == [("upload_file", "a.txt", "/b")]
    with pytest.raises(ConfigError, match=r"line 2: COPY: \.dockerignore can't be followed"):
        translated(context, "COPY . /b")


def test_a_base_is_needed(context: Path) -> None:
    with pytest.raises(ConfigError, match="FROM is missing"):
        DockerfileSteps("RUN x", context, 1)
    with pytest.raises(ConfigError, match="the escape character"):
        DockerfileSteps("# escape=`\nFROM debian", context, 1)


@pytest.mark.parametrize(
    ("text", "workdir"),
    [
        ("FROM a", None),
        ("FROM a\nWORKDIR /x\nWORKDIR y", "/x/y"),
        ("FROM a\nWORKDIR /x\nFROM b\nRUN y", None),
        ("FROM a\nENV HOME /h\nWORKDIR $HOME/w", "/h/w"),
        ("FROM a\nENV\tHOME\t/h\nWORKDIR $HOME/w", "/h/w"),
        ("FROM a\nENV HOME=/h\nWORKDIR $HOME/w\nADD https://example.com/x .", "/h/w"),
    ],
)
def test_where_a_built_image_works(text: str, workdir: str | None) -> None:
    assert find_last_workdir(text) == workdir
