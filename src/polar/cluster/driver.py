"""The process that is Ray's client for the server: `python -m polar.cluster.driver`, started by RayCluster.

It places nodes on the machines of the cluster, watches them and drains them (NodeSupervisor). It is a process of its
own because Ray ends its clients when it loses its head, and takes over their signals. It ends when its standard input
does (the server is gone, and the nodes are left as they are), or when it is told to drain.
"""

import io
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import ray
import ray.exceptions
from msgspec import Struct
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polar.cluster.actor import ActorStatus, NodeActor
from polar.cluster.driver_protocol import (
    DRAIN_LINE,
    ONE_PER_MACHINE,
    DriverConfig,
    DriverFailed,
    DriverMessage,
    LogMessage,
    NodesPlaced,
)
from polar.errors import ConfigError
from polar.gateway.http import is_loopback

_ray: Any = ray  # not all of it has types


class Machine(Struct, frozen=True):
    id: str  # Ray's: another each time that Ray is started there
    name: str
    address: str
    resources: dict[str, float]

    def satisfies(self, resources: Mapping[str, float]) -> bool:
        return all(self.resources.get(kind, 0) >= amount for kind, amount in resources.items())


def list_machines() -> list[Machine]:
    """Those that live."""
    return [
        Machine(
            node["NodeID"],
            re.sub(r"[^A-Za-z0-9._-]", "-", node["NodeName"]),  # it is to name a folder
            node["NodeManagerAddress"],
            node["Resources"],
        )
        for node in _ray.nodes()
        if node["Alive"]
    ]


def build_reachable_url(url: str) -> str:
    """The address of a server here that listens on all of this machine's, as the others name it."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    host = find_own_address()
    netloc = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=f"{netloc}:{parts.port}" if parts.port else netloc).geturl()


def find_unreachable_addresses(url: str, own: str, machines: list[Machine]) -> set[str]:
    """Addresses of machines to which that of the server, on the machine `own`, means something else."""
    if not is_loopback(urlsplit(url).hostname or ""):
        return set()
    return {machine.address for machine in machines} - {own}


def find_own_address() -> str:
    """Of this machine, as Ray knows it."""
    address: str = _ray.util.get_node_ip_address()
    return address


DRAIN_SECONDS = 60.0
_STATUS_SECONDS = 30.0  # for an actor to say what it is; one that is being restarted takes some
_KILL_SECONDS = 30.0  # for Ray to forget an actor that was killed
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 2.0, 60.0  # before an actor that could not be made is made again

LogLine = Callable[[Literal["info", "warning", "error"], str], None]


class NamespaceTaken(Exception):
    """Another server uses this namespace now."""


class _WatchedActor:
    """An actor that is there, or has been asked for."""

    def __init__(self, handle: Any, asked: Any, about: ActorStatus | None = None) -> None:
        self.handle = handle
        self.pending_status = asked  # what it is: the question that is open
        self.status = about  # the last answer


class NodeSupervisor:
    """The node actors of one server: found, placed, watched and drained.

    Actors are detached and have names, so that they live on when the server dies and its next start finds them:

        node@MACHINE   the one of a machine, bound to it (nodes = "each"); a machine is what Ray calls a node name
        node-NUMBER    one of so many, wherever Ray has room for it

    Ray restarts an actor whose process dies; one of so many may come up on another machine then. What Ray gives up (the
    actor of a machine that is gone, one that can't be made) is made anew here, as soon as there is a machine for it. An
    actor that was made for another server, or with other settings, is drained and replaced when this server starts.
    Where one belongs to another server later, two of them use one namespace, or one database: the later client of Ray's
    (it numbers them) keeps the nodes, and the other must not fight for them.
    """

    def __init__(self, orders: DriverConfig, log: LogLine) -> None:
        self._orders = orders
        self._task = orders.task
        self._log = log
        self._client = 0  # the number that Ray gave us
        self._watched: dict[str, _WatchedActor] = {}
        self._failures: dict[str, tuple[int, float]] = {}  # in a row, and when the next try is due
        self._reported_unreachable = False  # that was told

    @property
    def names(self) -> list[str]:
        return sorted(self._watched)

    def connect(self) -> None:
        orders = self._orders
        try:
            ray.init(
                address=orders.address,
                namespace=orders.namespace,
                ignore_reinit_error=True,
                configure_logging=False,
                log_to_driver=False,
            )
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(orders.format_unreachable_message(str(error).strip().splitlines()[0])) from error

    def start(self) -> None:
        """Takes over what a server before this one left, and places what is missing."""
        self._client = int.from_bytes(bytes.fromhex(ray.get_runtime_context().get_job_id()), "little")
        self._task = msgspec.structs.replace(self._task, server_url=build_reachable_url(self._task.server_url))
        wanted = self._desired_nodes()
        self._take_over(wanted)
        self._create_missing(wanted)

    def poll(self) -> None:
        """Hears what the actors say, and makes those that are missing."""
        self._poll_actors()
        there = set(ray.util.list_named_actors())
        for name in self._watched.keys() - there:
            del self._watched[name]
            if name not in self._failures:
                self._log("warning", f"Ray gave up {name}: its machine is gone, or it was killed.")
        self._create_missing(self._desired_nodes())

    def drain(self) -> None:
        """Ends all of them in good order, and leaves none behind."""
        self._poll_actors()
        # One that has not come up yet holds nothing.
        others = self._drain({name: one.handle for name, one in self._watched.items() if one.status is not None})
        self._kill({name: one.handle for name, one in self._watched.items() if name not in others})
        self._watched.clear()

    def _desired_nodes(self) -> dict[str, str | None]:
        """The names of nodes that should be there, with the machine that each is bound to (Ray's id of it)."""
        there = list_machines()
        if self._has_unreachable_machines(there):
            return {}
        if self._orders.nodes != ONE_PER_MACHINE:
            return {f"node-{number}": None for number in range(int(self._orders.nodes))}
        return {f"node@{machine.name}": machine.id for machine in there if machine.satisfies(self._orders.resources)}

    def _has_unreachable_machines(self, there: list[Machine]) -> bool:
        """Whether there are machines to which the server's address means something else."""
        url = self._task.server_url
        others = find_unreachable_addresses(url, find_own_address(), there)
        if not others:
            return False
        sentence = (
            f"Nodes on {', '.join(sorted(others))} can't reach the server at {url}: set [server] host to an address "
            "of this machine (and a token), or [cluster] server_url."
        )
        if not self._watched:
            raise ConfigError(sentence)
        if not self._reported_unreachable:
            self._log("error", sentence)
            self._reported_unreachable = True
        return True

    def _take_over(self, wanted: dict[str, str | None]) -> None:
        """What is there already stays if it is what we want; the rest is drained."""
        there = {
            name: handle
            for name in _filter_node_names(ray.util.list_named_actors())
            if (handle := _find_actor(name)) is not None
        }
        abouts = self._query_statuses(there)
        digest = self._task.digest
        others: dict[str, Any] = {}
        for name, handle in there.items():
            about = abouts.get(name)
            if name in wanted and about is not None and about.digest == digest and not about.ended:
                self._watched[name] = _WatchedActor(handle, handle.about.remote(self._client), about)
                self._log("info", f"{name} is there already (process {about.pid}).")
            else:
                others[name] = handle
        if others:
            self._log(
                "info", f"Draining {', '.join(sorted(others))}: ended, or made for another server, or other settings."
            )
            self._drain({name: handle for name, handle in others.items() if name in abouts})
            self._kill(others)

    def _query_statuses(self, handles: dict[str, Any]) -> dict[str, ActorStatus]:
        """Of those that answer in time."""
        asked = {handle.about.remote(self._client): name for name, handle in handles.items()}
        answers: dict[str, ActorStatus] = {}
        until = time.monotonic() + _STATUS_SECONDS
        while asked and (left := until - time.monotonic()) > 0:
            ready, _ = ray.wait(list(asked), timeout=left)
            for question in ready:
                name = asked.pop(question)
                try:
                    answers[name] = ray.get(question)
                except ray.exceptions.ActorUnavailableError:  # it is being restarted
                    asked[handles[name].about.remote(self._client)] = name
                    time.sleep(0.1)
                except Exception as error:  # noqa: BLE001  no actor of ours, or of another version
                    self._log("info", f"{name} does not say what it is ({type(error).__name__}).")
        return answers

    def _create_missing(self, wanted: dict[str, str | None]) -> None:
        now = time.monotonic()
        for name, machine in wanted.items():
            _, due = self._failures.get(name, (0, 0.0))
            if name not in self._watched and now >= due:
                handle = self._create_actor(name, machine)
                self._watched[name] = _WatchedActor(handle, handle.about.remote(self._client))
                self._log("info", f"{name} is asked for.")

    def _create_actor(self, name: str, machine: str | None) -> Any:
        resources = dict(self._orders.resources)
        strategy = "SPREAD" if machine is None else NodeAffinitySchedulingStrategy(machine, soft=False)
        options: dict[str, Any] = {
            "name": name,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": -1,
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "scheduling_strategy": strategy,
        }
        if "memory" in resources:
            options["memory"] = int(resources.pop("memory"))
        return ray.remote(NodeActor).options(**options, resources=resources).remote(name, self._client, self._task)

    def _poll_actors(self) -> None:
        for name, watched in list(self._watched.items()):
            self._poll_actor(name, watched)

    def _poll_actor(self, name: str, watched: _WatchedActor) -> None:
        ready, _ = ray.wait([watched.pending_status], timeout=0)
        if not ready:
            return  # it waits for room, or is being started
        try:
            about: ActorStatus = ray.get(watched.pending_status)
        except ray.exceptions.ActorUnavailableError:
            watched.pending_status = watched.handle.about.remote(self._client)  # it is being restarted
            return
        except ray.exceptions.ActorUnschedulableError:
            return  # its machine is gone, and Ray has given it up
        except ray.exceptions.RayActorError as error:
            self._record_failure(name, watched, error)
            return
        except Exception as error:  # noqa: BLE001  what it raised, or what can't be read: it lives, and is of no use
            self._record_failure(name, watched, error)
            self._kill({name: watched.handle})
            return
        if about.client > self._client:
            raise NamespaceTaken
        if about.digest != self._task.digest:
            self._kill({name: watched.handle})
            del self._watched[name]
            return
        if watched.status is None or watched.status.pid != about.pid:
            self._failures.pop(name, None)
            self._log("info", f"{name} runs (process {about.pid}).")
        if about.problem and (watched.status is None or watched.status.problem != about.problem):
            self._log("error", f"{name} can't serve: {about.problem}")
        watched.status = about
        watched.pending_status = watched.handle.about.remote(self._client)

    def _record_failure(self, name: str, watched: _WatchedActor, error: Exception) -> None:
        count, _ = self._failures.get(name, (0, 0.0))
        wait = min(_FIRST_RETRY_SECONDS * 2**count, _MAX_RETRY_SECONDS)
        self._failures[name] = count + 1, time.monotonic() + wait
        what = "could not be made" if watched.status is None else "is gone"
        why = str(error).strip().splitlines()[-1]
        self._log("error", f"{name} {what}, and is made anew in {wait:g} seconds: {why}")
        del self._watched[name]

    def _drain(self, handles: dict[str, Any]) -> set[str]:
        """Those that belong to another server, and go on."""
        draining = {handle.drain.remote(self._client): name for name, handle in handles.items()}
        others: set[str] = set()
        if not draining:
            return others
        drained, late = ray.wait(list(draining), num_returns=len(draining), timeout=DRAIN_SECONDS)
        for asked in drained:
            try:
                if not ray.get(asked):
                    others.add(draining[asked])
            except ray.exceptions.RayError as error:
                self._log("warning", f"{draining[asked]} ended before it was drained ({type(error).__name__}).")
        for asked in late:
            self._log("warning", f"{draining[asked]} was not drained in {DRAIN_SECONDS:g} seconds, and is killed.")
        return others

    def _kill(self, handles: dict[str, Any]) -> None:
        """Returns when Ray has forgotten them, and their names are free (or another's)."""
        left = dict(handles)
        for handle in left.values():
            ray.kill(handle, no_restart=True)
        until = time.monotonic() + _KILL_SECONDS
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = {name: handle for name, handle in left.items() if _find_actor(name) == handle}
        if left:
            self._log("warning", f"Ray still has {', '.join(sorted(left))}, which were killed.")


def _filter_node_names(names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if name.startswith(("node@", "node-")))


def _find_actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name)
    except ValueError:  # there is none (any more)
        return None


POLL_SECONDS = 2.0
CONNECT_SECONDS = 20.0


def main() -> int:
    lines = io.FileIO(0, closefd=False)  # unbuffered: a buffer would hide from `select` what it holds
    orders = msgspec.json.decode(lines.readline(), type=DriverConfig)
    out = os.dup(1)
    os.dup2(2, 1)  # Ray prints

    def write_message(line: DriverMessage) -> None:
        os.write(out, msgspec.json.encode(line) + b"\n")

    def log_line(level: Literal["info", "warning", "error"], text: str) -> None:
        write_message(LogMessage(level, text))

    def give_up() -> None:
        write_message(DriverFailed(orders.format_unreachable_message(f"no answer in {CONNECT_SECONDS:g} seconds")))
        os._exit(1)  # nothing else ends Ray's attempts

    nodes = NodeSupervisor(orders, log_line)
    patience = threading.Timer(CONNECT_SECONDS, give_up)
    patience.daemon = True
    patience.start()
    try:
        nodes.connect()
        patience.cancel()
        nodes.start()
        write_message(NodesPlaced(nodes.names))
        while not select.select([lines], [], [], POLL_SECONDS)[0]:
            nodes.poll()
        if lines.readline() == DRAIN_LINE:
            nodes.drain()
    except ConfigError as error:
        patience.cancel()
        write_message(DriverFailed(str(error)))
        return 1
    except NamespaceTaken:
        write_message(
            DriverFailed(
                f"Another server has taken over the nodes of the namespace {orders.namespace!r}: give each server "
                "on a Ray cluster a [cluster] namespace of its own.",
                final=True,
            )
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
