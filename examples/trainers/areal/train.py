"""GRPO with AReaL over Polar's sessions, after `polar up`.

    python train.py --config gsm8k_grpo.yaml gconfig.n_samples=1 \\
        actor.reward_norm=null actor.adv_norm=null actor.kl_ctl=0.0

The YAML file is that of AReaL's examples, with your model and cluster; the bridge's settings are in polar.toml.
"""

import sys
from pathlib import Path

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from datasets import Dataset

from polar.bridges.areal import follow
from polar.bridges.settings import load_settings
from polar.client.submission import load_tasks

POLAR = str(Path(__file__).with_name("polar.toml"))


def main(arguments: list[str]) -> None:
    config, _ = load_expr_config(arguments, GRPOConfig)
    tasks = Dataset.from_list(
        [{"task_id": task.task_id} for task in load_tasks(load_settings(POLAR).tasks, run="default")]
    )
    with PPOTrainer(config, train_dataset=tasks, valid_dataset=tasks) as trainer, follow(trainer, POLAR):
        trainer.train(
            workflow="polar.bridges.areal.PolarWorkflow",
            workflow_kwargs={"source": POLAR, "gconfig": config.gconfig},
            eval_workflow="polar.bridges.areal.PolarWorkflow",
            eval_workflow_kwargs={"source": POLAR, "samples": 1, "gconfig": config.eval_gconfig},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
