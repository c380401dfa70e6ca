"""NeMo Gym's own servers and collection of rollouts over the example's environment, and Harbor's models.

python loop_nemo_gym.py collect|harbor ASKED FOUND
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any


def collect(asked: dict[str, Any]) -> dict[str, Any]:
    """Starts the head server and the agent as `gym env start` and NeMo RL do, and collects as `ng_collect_rollouts`
    does; then asks the agent for a mere response, as another agent would."""
    folder = Path(asked["folder"])
    os.chdir(folder)
    from nemo_gym.cli.env import RunHelper
    from nemo_gym.global_config import GlobalConfigDictParserConfig
    from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollectionHelper
    from nemo_gym.server_utils import ServerClient, get_response_json, raise_for_status
    from omegaconf import DictConfig

    config = {
        "config_paths": ["polar.yaml"],
        "skip_venv_if_present": True,  # the agent runs in this environment
        "polar_agent": {"responses_api_agents": {"polar_agent": {"engines": [asked["engine"] + "/v1"]}}},
    }
    collection = RolloutCollectionConfig(
        agent_name="polar_agent",
        input_jsonl_fpath=asked["rows"],
        output_jsonl_fpath=str(folder / "rollouts.jsonl"),
        num_repeats=asked["repeats"],
        responses_create_params={"max_output_tokens": 5},
        upload_rollouts_to_wandb=False,
    )

    async def work() -> dict[str, Any]:
        await RolloutCollectionHelper().run_from_config(collection)
        client = ServerClient.load_from_global_config()
        body = {"input": [], "metadata": {"task_id": asked["one"]}}
        answer = await client.post("polar_agent", "/v1/responses", json=body)
        await raise_for_status(answer)
        return await get_response_json(answer)

    helper = RunHelper()
    helper.start(
        GlobalConfigDictParserConfig(
            skip_load_from_cli=True, skip_load_from_dotenv=True, initial_global_config_dict=DictConfig(config)
        )
    )
    try:
        response = asyncio.run(work())
    finally:
        helper.shutdown()
    return {
        "rollouts": _lines(folder / "rollouts.jsonl"),
        "failures": _lines(folder / "rollouts_failures.jsonl"),
        "metrics": json.loads((folder / "rollouts_aggregate_metrics.json").read_text()),
        "response": response,
    }


def harbor(asked: dict[str, Any]) -> dict[str, Any]:
    """What Harbor reads of an ATIF export, and of the example tasks in its own format."""
    from harbor.models.task.task import Task
    from harbor.models.trajectories import Trajectory

    trajectories = [Trajectory.model_validate(line) for line in _lines(Path(asked["export"]))]
    return {
        "steps": [[step.source for step in one.steps] for one in trajectories],
        "sampled": [
            step.metrics.completion_token_ids for one in trajectories for step in one.steps if step.metrics is not None
        ],
        "instructions": [Task(folder).instruction for folder in asked["tasks"]],
    }


def _lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    what, asked, found = sys.argv[1:]
    answer = globals()[what](json.loads(Path(asked).read_text()))
    Path(found).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
