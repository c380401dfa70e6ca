"""What every bridge promises: the protocol, and that it loads without its trainer."""

import subprocess
import sys

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
from polar import plugins
for name in plugins.names("bridges"):
    plugins.load("bridges", name)
trainers = {"areal", "art", "miles", "nemo_gym", "nemo_rl", "openrlhf", "skyrl", "slime", "tinker", "trl", "verifiers"}
print(sorted(({"torch", "verl"} | trainers) & sys.modules.keys()))
"""


def test_every_entry_point_is_a_bridge() -> None:
    loaded = {name: plugins.load("bridges", name) for name in plugins.names("bridges")}
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
