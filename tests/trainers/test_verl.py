"""verl's own trainer over Polar's rollouts: `verl.trainer.main_ppo` on a CPU (verl_cpu.py has what it lacks for that:
a platform without GPUs, and Polar's embedded engine in the place of the vLLM that verl would start)."""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from polar.bridges.verl import build_rows
from polar.client.submission import load_tasks
from polar.client.sync_client import Client
from tests.bridging import TOKEN, Served, served

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "trainers" / "venv" / "bin" / "python"
SESSIONS = 8


def overrides(it: Served, folder: Path, mode: str, **more: Any) -> list[str]:
    """verl's configuration: two steps of two prompts, one of them with sessions of three traces. `more` is Ray's."""
    known = {task.task_id: task for task in load_tasks(str(it.tasks))}
    data, loops = folder / "tasks.parquet", folder / "polar.yaml"
    wanted = [known[name] for name in ("plain-0", "split-0", "plain-1", "split-1")]
    pq.write_table(pa.Table.from_pylist(build_rows(wanted)), data)
    loop = {"name": "polar", "_target_": "polar.bridges.verl.AgentLoop", "settings": it.settings(name=mode)}
    loops.write_text(yaml.safe_dump([loop]))
    options = {
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": 2,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        "actor_rollout_ref.model.path": it.model,
        "actor_rollout_ref.model.use_remove_padding": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision": "{param_dtype: fp32, reduce_dtype: fp32}",
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.optim.lr": 0.01,
        "actor_rollout_ref.actor.optim.weight_decay": 0,  # so that a step without advantages changes nothing
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.rollout.name": "embedded",
        "actor_rollout_ref.rollout.n": SESSIONS,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": loops,
        "algorithm.adv_estimator": "grpo",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "reward.num_workers": 1,
        "trainer.v1.trainer_mode": f"recorded_{mode}",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 2,
        "trainer.val_before_train": mode == "sync",
        "trainer.logger": "[console]",
        "trainer.default_local_dir": folder / "checkpoints",
        "ray_kwargs.ray_init.num_cpus": 16,
    }
    options |= {f"+ray_kwargs.ray_init.{name}": value for name, value in more.items()}
    return [f"{name}={value}" for name, value in options.items()]


def run(it: Served, folder: Path, *command: str | Path, **more: str) -> str:
    """In the trainers' environment; what it said."""
    if not PYTHON.exists():
        pytest.fail("The trainers are not installed: run `make test-trainers`")
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "VERL_USE_EXTERNAL_MODULES": "tests.trainers.verl_cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # whose engine of verl's it is; it runs where the platform says
        "TEST_ENGINE": it.engine,
        "TEST_FOLDER": str(folder),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **more,
    }
    done = subprocess.run([PYTHON, *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-5000:])
    return done.stdout


def recorded(it: Served) -> dict[str, Any]:
    """All sessions as the service has them, by id."""
    with Client(it.url, TOKEN) as client:
        return {result.session_id: result for result in client.results(follow=False)}


def check_rows(step: dict[str, Any], sessions: dict[str, Any]) -> None:
    """What went into the loss is what was recorded, with one advantage for each session."""
    advantages: dict[str, set[float]] = {}
    rewards: dict[str, dict[str, float]] = {}
    taken: dict[str, set[int]] = {}
    for row in step["rows"]:
        if row["tag"].get("is_padding"):
            assert not any(row["response_mask"])
            continue
        told = row["extra_fields"]
        session = sessions[told["session_id"]]
        trace = session.trajectory.traces[told["trace"]]
        assert row["prompts"] == trace.prompt_ids
        assert row["responses"] == trace.response_ids
        assert row["response_mask"] == trace.loss_mask
        assert row["rollout_log_probs"] == trace.response_logprobs
        assert told["policy_versions"] == trace.model_extra["policy_versions"]
        sampled = [one for one, trains in zip(told["policy_versions"], trace.loss_mask, strict=True) if trains]
        assert row["tag"]["min_global_steps"] == min(sampled)
        assert row["tag"]["max_global_steps"] == max(sampled)
        assert sum(row["rm_scores"]) == session.reward
        group = row["key"].split("_")[0]
        rewards.setdefault(group, {})[told["session_id"]] = session.reward
        taken.setdefault(told["session_id"], set()).add(told["trace"])
        trained = zip(row["advantages"], row["response_mask"], strict=True)
        advantages.setdefault(told["session_id"], set()).update(value for value, trains in trained if trains)
    assert {len(one) for one in rewards.values()} == {SESSIONS}
    assert all(len(found) == len(sessions[name].trajectory.traces) for name, found in taken.items())
    for group in rewards.values():
        values = torch.tensor(list(group.values()), dtype=torch.float64)
        for name, reward in group.items():
            (advantage,) = advantages[name]
            wanted = (reward - values.mean()) / (values.std() + 1e-6)
            assert advantage == pytest.approx(float(wanted), abs=1e-4)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_verl_trains(mode: str, tmp_path: Path) -> None:
    """Two steps of verl's own loop; after each, the engines have new weights, and sessions are labelled with them."""
    with served(tmp_path) as it, TemporaryDirectory(prefix="ray-") as short:  # Ray's sockets want short names
        ray = {"address": "local", "_temp_dir": short, "num_gpus": 1, "object_store_memory": 200_000_000}
        asked = overrides(it, tmp_path, mode, **ray, include_dashboard=False)
        run(it, tmp_path, "-m", "verl.trainer.main_ppo", *asked)
        sessions = recorded(it)
        with Client(it.url, TOKEN) as client:
            policy = client.policy()
    groups = Counter(session.task_id for session in sessions.values())
    wanted = {f"{mode}/step-1/{name}": SESSIONS for name in ("plain-0", "split-0")}
    if mode == "sync":
        wanted |= {f"sync/step-2/{name}": SESSIONS for name in ("plain-1", "split-1")}
        wanted |= {f"sync/val-0/{name}": 1 for name in ("plain-0", "split-0", "plain-1", "split-1")}
        assert groups == wanted
    assert wanted.items() <= groups.items()
    assert not policy["paused"]
    assert [replica["version"] for replica in policy["replicas"]] == [2]
    weights = [load_file(tmp_path / f"weights-{version}.safetensors") for version in range(3)]
    for number in (1, 2):
        step = json.loads((tmp_path / f"step-{number}.json").read_text())
        check_rows(step, sessions)
        tasks = {row["extra_fields"]["task_id"].rsplit("/")[-1] for row in step["rows"] if row["extra_fields"]}
        if mode == "sync":  # else in the order in which they end
            assert tasks == {f"plain-{number - 1}", f"split-{number - 1}"}
        before, after = weights[number - 1], weights[number]
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        assert moved == any(value for row in step["rows"] for value in row["advantages"])
        if mode == "sync":  # where all of a step is sampled with the weights that it begins with
            assert {row["tag"]["max_global_steps"] for row in step["rows"]} == {number - 1}
            # verl's own comparison: its actor, and what the engine said when it sampled
            assert step["metrics"]["training/rollout_probs_diff_max"] < 1e-5


def test_a_split_session_has_the_same_gradient(tmp_path: Path) -> None:
    """With verl's advantages, loss and engine. The modes that the bridge refuses show that the test can tell."""
    with served(tmp_path) as it:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        wanted = json.dumps(it.settings(name="split"))
        script = Path(__file__).with_name("verl_gradient.py")
        said = run(it, tmp_path, script, wanted, *overrides(it, tmp_path, "sync"), **alone)
    told = json.loads(said.splitlines()[-1])
    for mode in ("token-mean", "token-sum"):
        assert max(told[mode]) < 1e-5, told
    for mode in ("seq-mean-token-mean", "seq-mean-token-sum"):
        assert max(told[mode]) > 1e-2, told


NAMED = """
import json, verl, numpy
from types import SimpleNamespace as Space
from polar.bridges.verl.trainer import NamingAgentLoopManager
from verl.utils import tensordict_utils as tu

given = []
rollout = Space(n=4, val_kwargs=Space(n=2))
config = Space(actor_rollout_ref=Space(rollout=rollout))
naming = NamingAgentLoopManager(Space(generate_sequences=given.append), config, {"a", "b"})
for step, more in ((3, {}), (3, {}), (3, {"validate": True}), (4, {})):
    batch = tu.get_tensordict({"task_id": numpy.array(["a", "b", "a"], dtype=object)})
    tu.assign_non_tensor(batch, global_steps=step, **more)
    naming.generate_sequences(batch)
print(json.dumps([[list(batch["polar_key"]), list(batch["polar_samples"])] for batch in given]))
"""


def test_groups_are_named(tmp_path: Path) -> None:
    """By step; a task that comes again in a step has a group of its own."""
    said = run(Served("http://127.0.0.1:1", "http://127.0.0.1:1", tmp_path, tmp_path), tmp_path, "-c", NAMED)
    assert json.loads(said.splitlines()[-1]) == [
        [["step-3", "step-3", "step-3.1"], [4, 4, 4]],
        [["step-3.2", "step-3.1", "step-3.3"], [4, 4, 4]],
        [["val-3", "val-3", "val-3.1"], [2, 2, 2]],
        [["step-4", "step-4", "step-4.1"], [4, 4, 4]],
    ]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "weighs rows"),
        ("algorithm.adv_estimator=rloo", "goes by row"),
    ],
)
def test_what_goes_by_row_is_refused(override: str, reason: str, tmp_path: Path) -> None:
    """Without Ray: the trainer is not even made."""
    script = (
        "import sys, verl\nfrom hydra import compose, initialize_config_module\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "with initialize_config_module('verl.trainer.config', version_base=None):\n"
        "    config = compose('ppo_trainer', overrides=sys.argv[1:])\n"
        "try:\n    get_trainer_cls('polar_sync')(config)\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    it = Served("http://127.0.0.1:1", "http://127.0.0.1:1", tmp_path, tmp_path)
    wanted = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm", override]
    said = run(it, tmp_path, "-c", script, *wanted)
    assert said.splitlines()[-1].startswith("ConfigError")
    assert reason in said.splitlines()[-1]
