"""ART trains and serves, and Polar runs the sessions:

python train.py          (after `polar up`; the bridge's settings are in polar.toml)
"""

import asyncio
from pathlib import Path

import art
from art.local import LocalBackend

from polar.bridges.art import Art

POLAR = Path(__file__).with_name("polar.toml")
TASKS_A_STEP = 8


async def main() -> None:
    backend = LocalBackend()
    model = art.TrainableModel(name="agent", project="polar", base_model="Qwen/Qwen3-4B-Instruct-2507")
    await model.register(backend)
    async with Art(POLAR) as polar:
        names = sorted(polar.rollouts.tasks)
        for step in range(await model.get_step(), 100):
            await polar.attach(model)
            tasks = [names[(step * TASKS_A_STEP + place) % len(names)] for place in range(TASKS_A_STEP)]
            groups = await polar.run_groups(tasks, step)
            await backend.train(model, groups, learning_rate=1e-5)


if __name__ == "__main__":
    asyncio.run(main())
