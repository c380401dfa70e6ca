"""Tinker trains, an engine of your own samples, and Polar runs the sessions:

TINKER_API_KEY=... python train.py          (after `polar up`; the bridge's settings are in polar.toml)
"""

from pathlib import Path

import tinker

from polar.bridges.tinker import Tinker

POLAR = Path(__file__).with_name("polar.toml")
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
TASKS_A_STEP = 8


def load(path: str) -> None:
    """Your engine gets the weights at this path of Tinker's: downloaded, converted, loaded as your engine has it."""
    raise NotImplementedError(f"load {path} into the engine that Polar samples with")


def main() -> None:
    client = tinker.ServiceClient().create_lora_training_client(base_model=MODEL, rank=32)
    with Tinker(POLAR) as polar:
        names = sorted(polar.rollouts.tasks)
        for step in range(100):
            tasks = [names[(step * TASKS_A_STEP + place) % len(names)] for place in range(TASKS_A_STEP)]
            batch = polar.batch(tasks, step)
            client.forward_backward(batch.datums, loss_fn="importance_sampling").result()
            client.optim_step(tinker.AdamParams(learning_rate=1e-5)).result()
            with polar.updating(step + 1):
                load(client.save_weights_for_sampler(name=f"step-{step + 1}").result().path)
            print(step, sum(batch.rewards) / max(len(batch.rewards), 1), dict(batch.left_out))


if __name__ == "__main__":
    main()
