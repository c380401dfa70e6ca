"""What every bridge promises: the protocol, and that it loads without its trainer."""

import subprocess
import sys
from importlib import import_module

from polar import plugins
from polar.bridges.areal import ArealBridge
from polar.bridges.art import Art
from polar.bridges.bridge import AsyncBridge, BlockingBridge, Bridge
from polar.bridges.nemo_gym import SessionRunner
from polar.bridges.nemo_rl import NemoRl
from polar.bridges.openrlhf.trainer import OpenRlhfBridge
from polar.bridges.skyrl import Generator
from polar.bridges.slime import SlimeBridge
from polar.bridges.tinker import Tinker
from polar.bridges.trl import RolloutFunc
from polar.bridges.verl.trainer import VerlBridge

BRIDGES: tuple[type[Bridge], ...] = (  # mypy compares each with the protocol
    ArealBridge,
    Art,
    AsyncBridge,
    BlockingBridge,
    Generator,
    NemoRl,
    OpenRlhfBridge,
    RolloutFunc,
    SessionRunner,
    SlimeBridge,
    Tinker,
    VerlBridge,
)
LOAD_ALL = """
import sys
from importlib import import_module
from polar import plugins
for name in plugins.list_names("bridges"):
    plugins.load("bridges", name)
trainers = {"areal", "art", "miles", "nemo_gym", "nemo_rl", "openrlhf", "skyrl", "slime", "tinker", "trl", "verifiers"}
print(sorted(({"torch", "verl"} | trainers) & sys.modules.keys()))
"""


def test_every_entry_point_is_a_bridge() -> None:
    loaded = {name: plugins.load("bridges", name) for name in plugins.list_names("bridges")}
    trainers = {
        "areal",
        "art",
        "nemo-gym",
        "nemo-rl",
        "openrlhf",
        "skyrl",
        "slime",
        "tinker",
        "trl",
        "verifiers",
        "verl",
    }
    assert loaded.keys() >= trainers
    assert {loaded[name] for name in trainers} == {*BRIDGES} - {BlockingBridge}


def test_bridges_load_without_their_trainers() -> None:
    """Nor do they import PyTorch: a trainer may have to set it up first."""
    done = subprocess.run([sys.executable, "-c", LOAD_ALL], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_in_launch_scripts_stay() -> None:
    """What the documents of an earlier version had users write."""
    assert import_module("polar.bridges.verl_trainer").trainer is import_module("polar.bridges.verl.trainer")
    for module, name in (
        ("verl", "AgentLoop"),
        ("slime", "generate_rollout"),
        ("slime", "normalize_rewards"),
        ("trl", "grpo_trainer"),
        ("trl", "async_grpo_trainer"),
        ("trl", "RolloutFunc"),
        ("skyrl", "main"),
        ("areal", "PolarWorkflow"),
        ("nemo_gym", "agent_class"),
    ):
        assert callable(getattr(import_module(f"polar.bridges.{module}"), name))
