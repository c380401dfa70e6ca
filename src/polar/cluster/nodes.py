"""The node actors of one server on a Ray cluster: found, placed, watched and drained.

Actors are detached and have names, so that they live on when the server dies and its next start finds them:

    node@MACHINE   the one of a machine, bound to it (nodes = "each"); a machine is what Ray calls a node name
    node-NUMBER    one of so many, wherever Ray has room for it

Ray restarts an actor whose process dies; one of so many may come up on another machine then. What Ray gives up (the
actor of a machine that is gone, one that can't be made) is made anew here, as soon as there is a machine for it. An
actor that was made for another server, or with other settings, is drained and replaced when this server starts. Where
one belongs to another server later, two of them use one namespace, or one database: the later client of Ray's (it
numbers them) keeps the nodes, and the other must not fight for them.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import msgspec
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polar.cluster import machines
from polar.cluster.actor import About, NodeActor
from polar.cluster.machines import Machine
from polar.cluster.orders import EACH, Orders
from polar.errors import ConfigError

DRAIN_SECONDS = 60.0
_ANSWER_SECONDS = 30.0  # for an actor to say what it is; one that is being restarted takes some
_GONE_SECONDS = 30.0  # for Ray to forget an actor that was killed
_SOON, _LATER = 2.0, 60.0  # before an actor that could not be made is made again

Tell = Callable[[Literal["info", "warning", "error"], str], None]


class Taken(Exception):
    """Another server uses this namespace now."""


class _Watched:
    """An actor that is there, or has been asked for."""

    def __init__(self, handle: Any, asked: Any, about: About | None = None) -> None:
        self.handle = handle
        self.asked = asked  # what it is: the question that is open
        self.about = about  # the last answer


class Nodes:
    def __init__(self, orders: Orders, tell: Tell) -> None:
        self._orders = orders
        self._task = orders.task
        self._tell = tell
        self._client = 0  # the number that Ray gave us
        self._watched: dict[str, _Watched] = {}
        self._failures: dict[str, tuple[int, float]] = {}  # in a row, and when the next try is due
        self._unreachable = False  # that was told

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
            raise ConfigError(orders.unreachable(str(error).strip().splitlines()[0])) from error

    def start(self) -> None:
        """Takes over what a server before this one left, and places what is missing."""
        self._client = int.from_bytes(bytes.fromhex(ray.get_runtime_context().get_job_id()), "little")
        self._task = msgspec.structs.replace(self._task, server_url=machines.reachable(self._task.server_url))
        wanted = self._wanted()
        self._take_over(wanted)
        self._place(wanted)

    def look(self) -> None:
        """Hears what the actors say, and makes those that are missing."""
        self._hear_all()
        there = set(ray.util.list_named_actors())
        for name in self._watched.keys() - there:
            del self._watched[name]
            if name not in self._failures:
                self._tell("warning", f"Ray gave up {name}: its machine is gone, or it was killed.")
        self._place(self._wanted())

    def drain(self) -> None:
        """Ends all of them in good order, and leaves none behind."""
        self._hear_all()
        # One that has not come up yet holds nothing.
        others = self._drain({name: one.handle for name, one in self._watched.items() if one.about is not None})
        self._kill({name: one.handle for name, one in self._watched.items() if name not in others})
        self._watched.clear()

    def _wanted(self) -> dict[str, str | None]:
        """The names of nodes that should be there, with the machine that each is bound to (Ray's id of it)."""
        there = machines.listed()
        if self._out_of_reach(there):
            return {}
        if self._orders.nodes != EACH:
            return {f"node-{number}": None for number in range(int(self._orders.nodes))}
        return {f"node@{machine.name}": machine.id for machine in there if machine.has(self._orders.resources)}

    def _out_of_reach(self, there: list[Machine]) -> bool:
        """Whether there are machines to which the server's address means something else."""
        url = self._task.server_url
        others = machines.cut_off(url, machines.own_address(), there)
        if not others:
            return False
        sentence = (
            f"Nodes on {', '.join(sorted(others))} can't reach the server at {url}: set [server] host to an address "
            "of this machine (and a token), or [cluster] server_url."
        )
        if not self._watched:
            raise ConfigError(sentence)
        if not self._unreachable:
            self._tell("error", sentence)
            self._unreachable = True
        return True

    def _take_over(self, wanted: dict[str, str | None]) -> None:
        """What is there already stays if it is what we want; the rest is drained."""
        there = {name: handle for name in _named(ray.util.list_named_actors()) if (handle := _actor(name)) is not None}
        abouts = self._answers(there)
        digest = self._task.digest
        others: dict[str, Any] = {}
        for name, handle in there.items():
            about = abouts.get(name)
            if name in wanted and about is not None and about.digest == digest and not about.ended:
                self._watched[name] = _Watched(handle, handle.about.remote(self._client), about)
                self._tell("info", f"{name} is there already (process {about.pid}).")
            else:
                others[name] = handle
        if others:
            self._tell(
                "info", f"Draining {', '.join(sorted(others))}: ended, or made for another server, or other settings."
            )
            self._drain({name: handle for name, handle in others.items() if name in abouts})
            self._kill(others)

    def _answers(self, handles: dict[str, Any]) -> dict[str, About]:
        """Of those that answer in time."""
        asked = {handle.about.remote(self._client): name for name, handle in handles.items()}
        answers: dict[str, About] = {}
        until = time.monotonic() + _ANSWER_SECONDS
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
                    self._tell("info", f"{name} does not say what it is ({type(error).__name__}).")
        return answers

    def _place(self, wanted: dict[str, str | None]) -> None:
        now = time.monotonic()
        for name, machine in wanted.items():
            _, due = self._failures.get(name, (0, 0.0))
            if name not in self._watched and now >= due:
                handle = self._made(name, machine)
                self._watched[name] = _Watched(handle, handle.about.remote(self._client))
                self._tell("info", f"{name} is asked for.")

    def _made(self, name: str, machine: str | None) -> Any:
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

    def _hear_all(self) -> None:
        for name, watched in list(self._watched.items()):
            self._hear(name, watched)

    def _hear(self, name: str, watched: _Watched) -> None:
        ready, _ = ray.wait([watched.asked], timeout=0)
        if not ready:
            return  # it waits for room, or is being started
        try:
            about: About = ray.get(watched.asked)
        except ray.exceptions.ActorUnavailableError:
            watched.asked = watched.handle.about.remote(self._client)  # it is being restarted
            return
        except ray.exceptions.ActorUnschedulableError:
            return  # its machine is gone, and Ray has given it up
        except ray.exceptions.RayActorError as error:
            self._failed(name, watched, error)
            return
        except Exception as error:  # noqa: BLE001  what it raised, or what can't be read: it lives, and is of no use
            self._failed(name, watched, error)
            self._kill({name: watched.handle})
            return
        if about.client > self._client:
            raise Taken
        if about.digest != self._task.digest:
            self._kill({name: watched.handle})
            del self._watched[name]
            return
        if watched.about is None or watched.about.pid != about.pid:
            self._failures.pop(name, None)
            self._tell("info", f"{name} runs (process {about.pid}).")
        if about.problem and (watched.about is None or watched.about.problem != about.problem):
            self._tell("error", f"{name} can't serve: {about.problem}")
        watched.about = about
        watched.asked = watched.handle.about.remote(self._client)

    def _failed(self, name: str, watched: _Watched, error: Exception) -> None:
        count, _ = self._failures.get(name, (0, 0.0))
        wait = min(_SOON * 2**count, _LATER)
        self._failures[name] = count + 1, time.monotonic() + wait
        what = "could not be made" if watched.about is None else "is gone"
        why = str(error).strip().splitlines()[-1]
        self._tell("error", f"{name} {what}, and is made anew in {wait:g} seconds: {why}")
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
                self._tell("warning", f"{draining[asked]} ended before it was drained ({type(error).__name__}).")
        for asked in late:
            self._tell("warning", f"{draining[asked]} was not drained in {DRAIN_SECONDS:g} seconds, and is killed.")
        return others

    def _kill(self, handles: dict[str, Any]) -> None:
        """Returns when Ray has forgotten them, and their names are free (or another's)."""
        left = dict(handles)
        for handle in left.values():
            ray.kill(handle, no_restart=True)
        until = time.monotonic() + _GONE_SECONDS
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = {name: handle for name, handle in left.items() if _actor(name) == handle}
        if left:
            self._tell("warning", f"Ray still has {', '.join(sorted(left))}, which were killed.")


def _named(names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if name.startswith(("node@", "node-")))


def _actor(name: str) -> Any | None:
    try:
        return ray.get_actor(name)
    except ValueError:  # there is none (any more)
        return None
