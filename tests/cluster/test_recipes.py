"""The recipes in examples/cluster, as far as one machine can follow them."""

import os
import signal
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.machines import PATIENCE, RAY, ROOT, alive, below, free_port, wait_until
from tests.cluster.stand_in import drained, starts

pytestmark = pytest.mark.cluster

RECIPES = ROOT / "examples" / "cluster"

# Slurm, with two machines that are both this one.
STUBS = {
    "scontrol": 'printf "first\\nsecond\\n"',
    "hostname": "echo 127.0.0.1",
    "srun": """
        name=second
        while [ "${1#--}" != "$1" ]; do
            [ "$1" = --nodelist=first ] && name=first
            shift
        done
        SLURMD_NODENAME=$name exec "$@"
    """,
    "ray": f"""
        [ "$1" = start ] || exec {sys.executable} -m ray.scripts.scripts "$@"
        case "$*" in *--head*) ;; *) unset RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER ;; esac
        exec {sys.executable} -m tests.cluster.ray_start "$@" --num-cpus=1 --object-store-memory=100000000
    """,
    "polar": f"""
        [ "$1 $2" = "up --config" ] || exit 2
        exec {sys.executable} -m tests.cluster.server_process "$POLAR_CLUSTER__ADDRESS" slurm "$NODES"
    """,
}


def test_slurm(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in STUBS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(stat.S_IRWXU)
    ray = tmp_path.parent / "r"  # short: Ray's sockets are in it
    nodes = tmp_path / "nodes"
    variables = os.environ | RAY | {"RAY_TMPDIR": str(ray), "RAY_PORT": str(free_port()), "NODES": str(nodes)}
    variables |= {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_JOB_NODELIST": "x[1-2]"}
    ray.mkdir()
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [RECIPES / "slurm.sh"], cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True
        )
    pids: set[int] = set()
    try:
        both = [nodes / "node@first", nodes / "node@second"]
        wait_until(lambda: job.poll() is not None or all(map(starts, both)))
        assert job.poll() is None, (tmp_path / "log").read_text()
        pids = below(job.pid)
        job.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
        assert [drained(node) for node in both] == [[start.pid for start in starts(node)] for node in both]
        wait_until(lambda: not any(map(alive, pids)), "the job left processes")
    finally:
        for pid in pids | below(job.pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        job.wait()


def test_kubernetes() -> None:
    """That the documents fit together; nobody has applied them here."""
    documents = list(yaml.safe_load_all((RECIPES / "kuberay.yaml").read_text()))
    by_kind: dict[str, Any] = {document["kind"]: document for document in documents}
    ray, server = by_kind["RayCluster"], by_kind["Deployment"]["spec"]["template"]
    [container] = server["spec"]["containers"]
    settings = tomllib.loads(by_kind["ConfigMap"]["data"]["polar.toml"])

    assert f"--address={ray['metadata']['name']}-head-svc:6379" in container["command"][-1]
    assert subprocess.run(["sh", "-n", "-c", container["command"][-1]], check=False).returncode == 0
    service = by_kind["Service"]
    assert service["spec"]["selector"].items() <= server["metadata"]["labels"].items()
    [port] = service["spec"]["ports"]
    assert settings["cluster"]["server_url"] == f"http://{service['metadata']['name']}:{port['port']}"

    [workers] = ray["spec"]["workerGroupSpecs"]
    mounts = workers["template"]["spec"]["containers"][0]["volumeMounts"]
    assert settings["cluster"]["data"] in [mount["mountPath"] for mount in mounts]
    asked = [sys.executable, "-m", "ray.scripts.scripts", "start", "--help"]
    options = subprocess.run(asked, capture_output=True, check=True, text=True).stdout
    for group in (ray["spec"]["headGroupSpec"], workers):
        for name in group["rayStartParams"]:
            assert f"--{name}" in options
