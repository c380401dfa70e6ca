"""The folder of a demo: its tasks, and the settings of its training, so that all of it can be read and run again.

    FOLDER/train.jsonl, held-out.jsonl    tasks
    FOLDER/train.toml                     `polar train FOLDER/train.toml` does the same

and whatever training keeps.
"""

import json
from pathlib import Path
from string import Template

from msgspec import Struct

from polar.demo import tasks
from polar.demo.questions import questions
from polar.train.settings import TrainSettings, load

_CONTEXT = 512  # tokens: a session has some 150
_CONTEXT_OF_HARNESSES = 32768

_FILE = "train.toml"
_SETTINGS = Template("""\
# What `polar demo` trains: the last half of the layers, on groups of sessions with the same question.
name = "demo"
output = "."
seed = $seed
steps = $steps

[model]
folder = $model
trainable_layers = $layers
threads = 1

[tasks]
train = ["train.jsonl"]
held_out = ["held-out.jsonl"]

[rollout]
group_size = $sessions
groups_per_step = $groups
max_lag = 1

[optimizer]
lr = 5e-5
betas = [0.9, 0.95]

[checkpoint]
keep = 1

# Two cores are enough: one that learns, one that samples, and the agents in between.
[polar.engine.options]
dtype = "float32"
threads = 1
context_length = $context
memory_gib = $memory

[polar.node]
run_workers = 12
""")


class Wanted(Struct, frozen=True):
    model: Path
    layers: int  # that are trained
    seed: int = 0
    steps: int = 14
    groups: int = 4  # in a step
    sessions: int = 8  # in a group
    held_out: int = 64
    harness: str | None = None


def begun(folder: Path) -> TrainSettings | None:
    """The settings of the demo that was begun in a folder, if one was: it goes on. Raises ConfigError."""
    settings = folder / _FILE
    return load(settings) if settings.exists() else None


def prepare(folder: Path, wanted: Wanted) -> TrainSettings:
    """Raises ConfigError."""
    settings = folder / _FILE
    asked = questions(train=wanted.steps * wanted.groups, held_out=wanted.held_out, seed=wanted.seed)
    tasks.write(folder, asked, 1, wanted.harness)
    written = _SETTINGS.substitute(
        seed=wanted.seed,
        steps=wanted.steps,
        groups=wanted.groups,
        sessions=wanted.sessions,
        layers=wanted.layers,
        model=json.dumps(str(wanted.model.absolute())),
        context=_CONTEXT if wanted.harness is None else _CONTEXT_OF_HARNESSES,
        memory=1 if wanted.harness is None else 8,
    )
    settings.write_text(written)
    return load(settings)
