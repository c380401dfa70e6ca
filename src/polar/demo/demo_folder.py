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
from polar.demo.questions import make_questions
from polar.train.settings import TrainSettings, load_settings

_CONTEXT_TOKENS = 512  # a session has about 150
_HARNESS_CONTEXT_TOKENS = 32768

_SETTINGS_FILE = "train.toml"
_SETTINGS_TEMPLATE = Template("""\
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


class DemoOptions(Struct, frozen=True):
    model: Path
    trained_layers: int  # the last ones of the model
    seed: int = 0
    steps: int = 14
    groups: int = 4  # per step
    sessions: int = 8  # per group
    held_out: int = 64
    harness: str | None = None


def load_existing(folder: Path) -> TrainSettings | None:
    """The settings of a demo that was started in this folder, or None. Raises ConfigError."""
    settings = folder / _SETTINGS_FILE
    return load_settings(settings) if settings.exists() else None


def create_demo_folder(folder: Path, options: DemoOptions) -> TrainSettings:
    """Writes tasks and settings of a new demo. Raises ConfigError."""
    settings = folder / _SETTINGS_FILE
    questions = make_questions(train=options.steps * options.groups, held_out=options.held_out, seed=options.seed)
    tasks.write_tasks(folder, questions, 1, options.harness)
    written = _SETTINGS_TEMPLATE.substitute(
        seed=options.seed,
        steps=options.steps,
        groups=options.groups,
        sessions=options.sessions,
        layers=options.trained_layers,
        model=json.dumps(str(options.model.absolute())),
        context=_CONTEXT_TOKENS if options.harness is None else _HARNESS_CONTEXT_TOKENS,
        memory=1 if options.harness is None else 8,
    )
    settings.write_text(written)
    return load_settings(settings)
