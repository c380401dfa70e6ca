"""python tools/check_release.py DIST: tries the wheel of a folder as its first user would.

It is installed in an empty environment, outside of the repository; then `polar` says its version and its commands, and
captures examples/hello/agent.py with the scripted engine.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(dist: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wheel_name = f"{project['name'].replace('-', '_')}-{project['version']}"
    [wheel] = dist.glob(f"{wheel_name}-*.whl")
    assert (dist / f"{wheel_name}.tar.gz").is_file(), "there is no sdist beside the wheel"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        venv.create(folder / "venv", with_pip=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("POLAR_", "PYTHON"))}
        environment |= {"PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}
        shutil.copy(ROOT / "examples" / "hello" / "agent.py", folder)
        shutil.copy(ROOT / "examples" / "plays" / "hello.toml", folder / "play.toml")
        (folder / "polar.toml").write_text('[engine]\nkind = "scripted"\noptions = { play = "play.toml" }\n')

        def run(*command: str) -> str:
            print("$", *command, flush=True)
            done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
            print(done.stdout, end="")
            if done.returncode != 0:
                sys.exit(f"{command[0]} ended with {done.returncode}.")
            return done.stdout

        pip_environment = environment | {"HOME": os.environ.get("HOME", str(folder))}  # with the user's settings of pip
        install = [folder / "venv" / "bin" / "python", "-m", "pip", "install", "-q", wheel.resolve()]
        subprocess.run(install, cwd=folder, env=pip_environment, check=True)
        assert project["version"] in run("polar", "--version"), "another version is installed"
        run("polar", "--help")
        agent = ("python", "agent.py", "What is in examples/hello?")
        captured = json.loads(run("polar", "capture", "--json", "--", *agent).splitlines()[-1])
        assert (captured["exchanges"], captured["exit_code"]) == (2, 0), captured
        run("polar", "verify")
        run("polar", "export", "--format", "trl", "-o", "rows.jsonl")
    print(f"{wheel.name} works.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
