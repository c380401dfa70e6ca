"""`docker`: containers of a Docker daemon on this machine (20.10 or later)."""

from polar.runtimes.containers import Containers


class Docker(Containers):
    name = "docker"
    advice = "install Docker (Debian: docker.io) and start its daemon, dockerd"
