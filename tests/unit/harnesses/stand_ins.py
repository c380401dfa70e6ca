"""Stand-ins for npm and patchelf: programs on PATH, since registries can't be asked here. What they are asked for is
logged, and a test can have npm wait, fail, or bring something broken."""

import os
from pathlib import Path

import pytest

from polar.harnesses import load_harness
from polar.harnesses.base import Harness, Package

# npm install --prefix FOLDER ... NAME@VERSION: its Node is a shell, and so a package's command is a script of sh.
_NPM = """\
#!/bin/sh
echo "$*" >> {log}
while [ $# -gt 1 ]; do [ "$1" = --prefix ] && folder=$2; shift; done
case $1 in
node-linux-*)
    name=${{1%@*}}
    mkdir -p "$folder/node_modules/$name/bin"
    cp /bin/sh "$folder/node_modules/$name/bin/node"
    exit;;
esac
touch {log}.started
[ -p {log}.wait ] && cat {log}.wait > /dev/null
[ -e {log}.fail ] && {{ echo "E404 no such package"; exit 1; }}
name=${{1%@*}} version=${{1##*@}}
[ "$version" = latest ] && version=9.9.9
mkdir -p "$folder/node_modules/$name/dist" "$folder/node_modules/.bin"
echo "{{\\"version\\": \\"$version\\"}}" > "$folder/node_modules/$name/package.json"
{{ echo '#!/usr/bin/env node'; cat {log}.program; }} > "$folder/node_modules/$name/dist/cli.js"
chmod +x "$folder/node_modules/$name/dist/cli.js"
ln -s "../$name/dist/cli.js" "$folder/node_modules/.bin/{executable}"
"""


class Tools:
    def __init__(self, folder: Path, executable: str) -> None:
        self._log = folder / "npm.log"
        self.program('echo "agent $*"')
        self._write(folder / "npm", _NPM.format(log=self._log, executable=executable))
        self._write(folder / "patchelf", "#!/bin/sh\n")

    def program(self, script: str) -> None:
        """What the package's command does."""
        self._beside("program").write_text(f"{script}\n")

    def hold(self) -> None:
        """npm waits, until `release`."""
        os.mkfifo(self._beside("wait"))

    def release(self) -> None:
        with self._beside("wait").open("w"):
            self._beside("wait").unlink()

    def fail(self) -> None:
        self._beside("fail").touch()

    @property
    def has_started(self) -> bool:
        return self._beside("started").exists()

    def installed(self) -> list[str]:
        """What npm was asked for, Node aside."""
        words = [line.split()[-1] for line in self._log.read_text().splitlines()] if self._log.exists() else []
        return [word for word in words if not word.startswith("node-linux-")]

    def _beside(self, name: str) -> Path:
        return self._log.with_name(f"{self._log.name}.{name}")

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, executable: str = "agent") -> Tools:
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return Tools(folder, executable)


def harness(package: Package | None = None) -> Harness:
    """A preset whose package is the stand-in's."""
    found = load_harness("pi")
    found.name = "agent"
    found.package = package or Package("npm", "agent", "1.2.3", "agent")
    return found
