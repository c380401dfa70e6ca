"""A small image for container tests, made of this machine's own shell, core utilities and Python. No registry is asked.

python -m tests.contract.image docker
"""

import io
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

PLAIN = "localhost/polar-contract:plain4"
OTHER = "localhost/polar-contract:other"  # with a user of its own, and a volume
CHANGES = {PLAIN: (), OTHER: ("USER agent", "VOLUME /data")}

TOOLS = """
    sh bash env sleep cat ls echo printf true false mkdir rmdir rm cp mv ln chmod chown touch id stat mktemp
    head tail wc grep sed sort find ps kill nohup setsid dd df timeout yes seq tr cut basename dirname
    readlink uname hostname test mkfifo sync tee date whoami pwd xargs git diff patch awk uniq cmp nl od comm paste
""".split()  # noqa: SIM905 (sixty quoted strings would say no more)
UNUSED = {"test", "tests", "site-packages", "idlelib", "tkinter", "turtledemo", "ensurepip", "__pycache__", "lib2to3"}
GLIBC = "libdl.so.2 libpthread.so.0 librt.so.1 libm.so.6 libutil.so.1 libresolv.so.2 libnss_files.so.2".split()  # noqa: SIM905
"""Which every image has, whether its own programs need them or not."""
FOLDERS = {
    "tmp": 0o1777,
    "var/tmp": 0o1777,
    "root": 0o755,
    "proc": 0o555,
    "sys": 0o555,
    "dev": 0o755,
    "etc": 0o755,
    "data": 0o777,
}
PASSWD = b"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/sh\n"
GROUP = b"root:x:0:\nagent:x:1000:\n"


def libraries(binary: Path) -> set[Path]:
    """What a binary is linked against, as the loader finds it here."""
    listed = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
    words = (word for line in listed.splitlines() for word in line.split())
    return {Path(word) for word in words if word.startswith("/")}


def write_image(file: io.IOBase) -> None:
    """The root file system, as a tar. Everything that is a program stands in /usr/bin under its own name."""
    with tarfile.open(fileobj=file, mode="w|", dereference=True) as tar:  # type: ignore[call-overload]
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        python = Path(sys._base_executable).resolve()  # type: ignore[attr-defined]
        programs = {tool: Path(found).resolve() for tool in TOOLS if (found := shutil.which(tool))}
        modules = list((stdlib / "lib-dynload").glob("*.so"))
        needed = set().union(*(libraries(binary) for binary in (python, *programs.values(), *modules)))
        libc = next(path for path in needed if path.name == "libc.so.6")
        needed |= {path for name in GLIBC if (path := libc.with_name(name)).exists()}

        def folder(name: str, mode: int) -> None:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)

        def link(name: str, target: str) -> None:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)

        def text(name: str, content: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))

        def useful(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            entry.uid = entry.gid = 0
            return None if UNUSED & set(Path(entry.name).parts[len(stdlib.parts) - 1 :]) else entry

        for name, mode in FOLDERS.items():
            folder(name, mode)
        for name in ("bin", "sbin", "lib", "lib64"):
            folder(f"usr/{name}", 0o755)
            link(name, f"usr/{name}")
        text("etc/passwd", PASSWD)
        text("etc/group", GROUP)
        for library in sorted(needed):
            inside = library.as_posix().lstrip("/")
            tar.add(library, f"usr/{inside}" if inside.startswith("lib") else inside)
        for tool, binary in programs.items():
            tar.add(binary, f"usr/bin/{tool}")
        tar.add(python, python.as_posix().lstrip("/"))
        tar.add(stdlib, stdlib.as_posix().lstrip("/"), filter=useful)
        if python != Path("/usr/bin/python3"):
            link("usr/bin/python3", python.as_posix())


def ensure_image(engine: str, name: str = PLAIN) -> str:
    """The image's name, once the engine has it."""
    if subprocess.run([engine, "image", "inspect", name], capture_output=True, check=False).returncode:
        changes = [word for change in CHANGES[name] for word in ("--change", change)]
        command = [engine, "import", *changes, "-", name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as made:
            assert made.stdin is not None
            write_image(made.stdin)
            made.stdin.close()
        if made.returncode:
            raise RuntimeError(f"{engine} import failed with status {made.returncode}")
    return name


if __name__ == "__main__":
    print(ensure_image(sys.argv[1]))
