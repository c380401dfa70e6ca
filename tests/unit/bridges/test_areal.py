"""AReaL's engine, followed; the service is played by hand. The workflow itself is in tests/trainers/test_areal.py."""

from types import SimpleNamespace
from typing import Any

import pytest

from polar.bridges import areal, rollouts
from polar.bridges.rollouts import RolloutClient, SessionGroup
from polar.config import SamplingOverrides
from polar.errors import ConfigError
from polar.testing.conversations import make_session_item
from polar.testing.token_paths import make_path, make_session_paths
from tests.unit.bridges.pretending import pretend


class PlayedBridge:
    def __init__(self, _: Any) -> None:
        self.told: list[Any] = []
        self.engines = self

    def attach(self, urls: list[str], version: int) -> Any:
        return (urls, version)

    def freeze(self, mode: str) -> Any:
        return mode

    def run(self, what: Any) -> None:
        self.told.append(what)


@pytest.fixture(autouse=True)
def _bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(areal, "BlockingBridge", PlayedBridge)


def trainer(**changes: Any) -> Any:
    actor: dict[str, Any] = {"reward_norm": None, "adv_norm": None, "discount": 1.0, "gae_lambda": 1.0}
    actor |= {"kl_ctl": 0.0, "overlong_reward_penalty": False, "temperature": 0.7} | changes
    config = SimpleNamespace(gconfig=SimpleNamespace(n_samples=actor.pop("n_samples", 1), temperature=0.7))
    critic = actor.pop("critic", None)
    config.actor = SimpleNamespace(**actor)
    done: list[str] = []
    engine = SimpleNamespace(
        addresses=["10.0.0.1:80", "10.0.0.2:80"],
        version=3,
        pause=lambda: done.append("pause"),
        resume=lambda: done.append("resume"),
    )
    engine.get_version = lambda: engine.version
    engine.set_version = lambda version: setattr(engine, "version", version)
    return SimpleNamespace(config=config, rollout=engine, critic=critic, done=done)


def test_generation_stands_still_while_weights_change() -> None:
    one = trainer()
    bridge: Any = areal.follow(one).bridge
    urls = ["http://10.0.0.1:80", "http://10.0.0.2:80"]
    assert bridge.told == [(urls, 3)]
    one.rollout.pause()
    assert (one.done, bridge.told[1:]) == (["pause"], ["drain"])
    one.rollout.set_version(4)
    assert bridge.told[2:] == [(urls, 4)]  # AReaL evaluates before it resumes
    one.rollout.resume()
    assert (one.done, bridge.told[3:]) == (["pause", "resume"], [])


def test_weights_without_a_new_version() -> None:
    """As when AReaL recovers: it says the version behind."""
    one = trainer()
    bridge: Any = areal.follow(one).bridge
    one.rollout.pause()
    one.rollout.resume()
    assert bridge.told[1:] == ["drain", (urls := ["http://10.0.0.1:80", "http://10.0.0.2:80"], 3)]
    one.rollout.set_version(5)
    assert bridge.told[3:] == [(urls, 5)]


def test_engines_that_sleep_are_not_asked() -> None:
    """AReaL's order, where trainer and engines share their devices."""
    one = trainer()
    engine = one.rollout
    engine.offload, engine.onload = lambda: one.done.append("offload"), lambda: one.done.append("onload")
    one._should_offload_rollout, one.eval_rollout = True, SimpleNamespace(**vars(engine))
    bridge: Any = areal.follow(one).bridge
    urls = ["http://10.0.0.1:80", "http://10.0.0.2:80"]
    bridge.told.clear()
    for call in (engine.pause, engine.offload, engine.pause):
        call()
    engine.set_version(4)
    assert bridge.told == ["drain", "drain"]
    one.eval_rollout.onload()
    one.eval_rollout.resume()
    assert bridge.told[2:] == [(urls, 4)]
    for call in (one.eval_rollout.pause, one.eval_rollout.offload, engine.resume):
        call()
    assert bridge.told[3:] == ["drain"]
    engine.onload()
    engine.resume()
    assert bridge.told[4:] == [(urls, 4)]


def test_servers_of_a_controller() -> None:
    one = trainer()
    one.rollout.server_infos = [SimpleNamespace(host="there", port=81)]
    bridge: Any = areal.follow(one).bridge
    assert bridge.told == [(["http://there:81"], 3)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_samples": 4}, r"gconfig\.n_samples must be 1"),
        ({"reward_norm": "any"}, "set them to null"),
        ({"adv_norm": SimpleNamespace(mean_level="group", std_level="batch")}, "set them to null"),
        ({"kl_ctl": 0.1}, r"actor\.kl_ctl must be 0\.0"),
        ({"critic": "one"}, "train without one"),
        ({"temperature": 1.0}, r"actor\.temperature must be gconfig\.temperature"),
    ],
)
def test_what_goes_by_rows_or_another_temperature_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        areal.follow(trainer(**changes))


def test_a_task_that_comes_again_at_the_same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is another group; one that is asked for after a crash is the same. AReaL may make a workflow for each episode."""
    monkeypatch.setattr(areal, "_register_workflow", lambda: None)
    asked = [("a", 0, False), ("b", 0, False), ("a", 0, False), ("a", 1, False), ("a", 1, True)]
    for engine in (Engine(), Engine()):
        keys = []
        for task, engine.version, evaluates in asked:
            workflow = areal.PolarWorkflow({"tasks": ["anywhere"], "name": "one"})
            keys.append(workflow._make_group_key(engine, task, evaluates=evaluates))
        assert keys == ["v0", "v0", "v0.1", "v1", "eval-v1"]


def test_ranks_have_groups_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(areal, "_register_workflow", lambda: None)
    workflow = areal.PolarWorkflow({"tasks": ["anywhere"], "name": "one"})
    names = ["0", "1", "12", "0123456789abcdef"]  # the last is one that is alone
    keys = [workflow._make_group_key(Engine(name), "a", evaluates=False) for name in names]
    assert keys == ["v0", "v0-r1", "v0-r12", "v0"]


@pytest.fixture
def episodes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """AReaL's modules, as far as an episode needs them, and a service without a session of another temperature than
    0.7. The clients that were made."""
    monkeypatch.setattr(areal, "_register_workflow", lambda: None)
    monkeypatch.setattr(rollouts, "_shared_groups", {})
    made: list[Any] = []

    class Asked(RolloutClient):
        def __init__(self, _: Any) -> None:
            made.append(self)

        async def run_group(self, task: str, key: str, **_: Any) -> SessionGroup:
            ran = make_session_item(make_session_paths(make_path(0, [1, 2], [3], scale=0.7), reward=1.0), task_id=task)
            return SessionGroup(task, key, 1, [ran], [])

    monkeypatch.setattr(rollouts, "RolloutClient", Asked)
    parts: dict[str, dict[str, Any]] = {
        "areal.infra": {"workflow_context": Context},
        "areal.utils": {"stats_tracker": SimpleNamespace(get=lambda _: SimpleNamespace(scalar=lambda **_: None))},
        "areal.utils.data": {"concat_padded_tensors": lambda rows: {"rows": rows}},
    }
    pretend(monkeypatch, parts)
    monkeypatch.setattr(Context, "evaluates", False)
    return made


class Context:
    evaluates = False

    @classmethod
    def get(cls) -> Any:
        return SimpleNamespace(is_eval=cls.evaluates)

    @classmethod
    def stat_scope(cls) -> str:
        return "rollout"


def workflow(temperature: float) -> areal.PolarWorkflow:
    gconfig = SimpleNamespace(temperature=temperature, top_p=1.0, top_k=-1, greedy=False)
    return areal.PolarWorkflow({"tasks": ["anywhere"], "name": "one"}, gconfig=gconfig)


async def test_workflows_of_a_loop_share_a_client(episodes: list[Any]) -> None:
    """AReaL makes one for each episode where it has it by its name."""
    for _ in range(3):
        found = await workflow(0.7).arun_episode(Engine(), {"task_id": "a"})
        assert found is not None
        assert len(found["rows"]) == 1
    assert len(episodes) == 1


@pytest.mark.usefixtures("episodes")
async def test_log_probabilities_of_another_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are not trained on; an evaluation has no use for them."""
    with pytest.raises(ConfigError, match=r"computes at temperature 1, .* of temperature 0\.7"):
        await workflow(1.0).arun_episode(Engine(), {"task_id": "a"})
    monkeypatch.setattr(Context, "evaluates", True)
    assert await workflow(1.0).arun_episode(Engine(), {"task_id": "a"})


class Engine:
    def __init__(self, engine_id: str = "0") -> None:
        self.engine_id = engine_id
        self.version = 0

    def get_version(self) -> int:
        return self.version


@pytest.mark.parametrize(("top_k", "ours"), [(10**8, 0), (-1, 0), (20, 20)])
def test_sampling_is_the_trainers(top_k: int, ours: int) -> None:
    given = SimpleNamespace(temperature=0.7, top_p=0.9, top_k=top_k, greedy=False)
    assert areal._build_sampling(given) == SamplingOverrides(temperature=0.7, top_p=0.9, top_k=ours)
    given.greedy = True
    assert areal._build_sampling(given).temperature == 0
