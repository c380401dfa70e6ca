"""`docker`: containers of a Docker daemon on this machine (20.10 or later)."""

from polar.runtimes.container_backend import ContainerBackend


class Docker(ContainerBackend):
    name = "docker"
    install_hint = "install Docker (Debian: docker.io) and start its daemon, dockerd"
