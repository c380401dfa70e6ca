"""What of SkyRL's bridge needs no SkyRL; tests/trainers/test_skyrl.py has its own loop."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polar.bridges import skyrl
from polar.bridges.rollouts import GroupKeys, SessionGroup
from polar.bridges.skyrl import build_lines, check_config, weight_advantages_by_session
from polar.errors import ConfigError
from polar.records.trajectory import SessionPaths
from polar.testing.conversations import make_session_item
from polar.testing.token_paths import make_path


def group(asked: int, *rewards: float, scale: float | None = 1.0) -> SessionGroup:
    """Sessions of two traces."""
    calls = [make_path(0, [1, 2], [3, 4], scale=scale), make_path(1, [5], [6], scale=scale)]
    items = [
        make_session_item(SessionPaths(f"s{number}", calls, reward), task_id="t")
        for number, reward in enumerate(rewards)
    ]
    return SessionGroup("t", "train/1/t", asked, items, [], Counter(timeout=asked - len(rewards)))


def test_rows_of_a_group() -> None:
    """Sessions are told apart by their number, and their traces belong together."""
    first, second = build_lines("7", group(2, 1.0, 0.0))
    assert first["response_ids"] == [[3, 4], [6]]
    assert first["is_last_step"] == [False, True]
    assert first["trajectory_ids"] == [{"instance_id": "7", "repetition_id": 0}] * 2
    assert second["trajectory_ids"] == [{"instance_id": "7", "repetition_id": 1}] * 2


def test_what_there_is_no_baseline_for_does_not_train() -> None:
    (alone,) = build_lines("7", group(2, 1.0))
    assert alone["loss_masks"] == [[0, 0], [0]]
    (only,) = build_lines("7", group(1, 1.0))
    assert only["loss_masks"] == [[1, 1], [1]]
    (nothing,) = build_lines("7", group(2))
    assert nothing["loss_masks"] == [[0]]
    assert nothing["trajectory_ids"] == [{"instance_id": "7", "repetition_id": 0}]


class Played(skyrl.Generator):
    """Over groups that are there already, with what was asked for."""

    def __init__(self, **groups: SessionGroup) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

        async def run(task: str, key: str, *, samples: int, sampling: Any) -> SessionGroup:
            assert samples == 2
            self.asked.append((f"{key}/{task}", sampling.model_dump(exclude_none=True)))
            return groups[task]

        self.rollouts, self._keys = SimpleNamespace(run_group=run), GroupKeys()  # type: ignore[assignment]

    async def lines(self, *tasks: str, phase: str = "train", sampling: dict[str, Any] | None = None) -> list[Any]:
        asked = {
            "batch_metadata": SimpleNamespace(training_phase=phase, global_step=1),
            "sampling_params": sampling,
            "trajectory_ids": [SimpleNamespace(instance_id=task) for task in tasks for _ in range(2)],
            "env_extras": [{"task_id": task} for task in tasks for _ in range(2)],
        }
        return list((await self.generate(asked))["lines"])


@pytest.fixture
def _raw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines as they are: SkyRL's own type is not here."""
    monkeypatch.setattr(skyrl, "to_generator_output", lambda lines: {"lines": lines, "rollout_metrics": {}})


@pytest.mark.usefixtures("_raw")
async def test_a_task_that_comes_again_in_a_step_has_another_group() -> None:
    generator = Played(a=group(2, 1.0, 0.0))
    await generator.lines("a")
    await generator.lines("a")
    await generator.lines("a", phase="eval")
    assert [name for name, _ in generator.asked] == ["train-1/a", "train-1.1/a", "eval-1/a"]


@pytest.mark.usefixtures("_raw")
async def test_sampling_is_skyrls() -> None:
    """vLLM's -1 is our 0: all tokens, whatever the harness asks for. Lengths are for the harness to say."""
    generator = Played(a=group(2, 1.0, 0.0))
    await generator.lines("a", sampling={"temperature": 1.0, "top_k": -1, "max_tokens": 5, "min_p": None})
    assert generator.asked == [("train-1/a", {"temperature": 1.0, "top_k": 0})]


@pytest.mark.usefixtures("_raw")
@pytest.mark.parametrize("scale", [1.0, None])
async def test_log_probabilities_of_another_temperature(scale: float | None) -> None:
    """Are not trained on; an evaluation's may be what they like."""
    generator = Played(a=group(2, 1.0, 0.0, scale=scale))
    with pytest.raises(ConfigError, match=r"temperature 0\.7, and the log-probabilities of s0 are of temperature"):
        await generator.lines("a", sampling={"temperature": 0.7})
    assert await generator.lines("a", sampling={"temperature": 0.7}, phase="eval")


@pytest.mark.usefixtures("_raw")
@pytest.mark.parametrize("phase", ["eval", "train"])
async def test_an_evaluation_has_no_reward_for_what_the_platform_failed(
    caplog: pytest.LogCaptureFixture, phase: str
) -> None:
    generator = Played(good=group(2, 1.0), lost=group(2), alone=group(2, 0.5))

    async def uids(*tasks: str) -> list[str]:
        found = await generator.lines(*tasks, phase=phase)
        return [line["trajectory_ids"][0]["instance_id"] for line in found]

    assert await uids("good", "lost", "alone") == (["good", "alone"] if phase == "eval" else ["good", "lost", "alone"])
    assert ("1 of 3 prompts of this evaluation have no session with a reward (timeout: 2)" in caplog.text) == (
        phase == "eval"
    )
    assert await uids("lost") == ["lost"]  # SkyRL takes no batch without a row
    assert ("which counts as 0" in caplog.text) == (phase == "eval")


class Batch(dict[str, Any]):
    metadata: dict[str, Any]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [1.0, 1.0, 1.0, 1.0]),
        ("sequence_mean", [0.75 * 1.5, 0.25 * 1.5, 1.5, 1.0]),
        ("seq_mean_token_sum_norm", [1.5, 1.5, 1.5, 1.0]),
    ],
)
def test_reductions_that_count_rows_count_sessions(reduction: str, expected: list[float]) -> None:
    """Three rows of two sessions in the first mini-batch, one in the second."""
    mask = torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=torch.float)
    batch = Batch(advantages=torch.ones(4, 3), loss_mask=mask)
    batch.metadata = {"is_last_step": [False, True, True, True], "policy_mini_batch_boundaries": [(0, 3), (3, 4)]}
    assert weight_advantages_by_session(batch, reduction)["advantages"][:, 0].tolist() == pytest.approx(expected)


def configuration(**changes: Any) -> Any:
    correction = {"tis_ratio_type": "token", "sequence_mask_metric": None}
    algorithm = {
        "temperature": 1.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.001,
        "use_kl_in_reward": False,
        "use_entropy_loss": False,
        "advantage_batch_normalize": False,
        "policy_loss_type": "regular",
    }
    generator = {
        "sampling_params": SimpleNamespace(temperature=1.0),
        "step_wise_trajectories": True,
        "apply_overlong_filtering": False,
        "zero_reward_on_non_stop": False,
    }
    for table in (correction, algorithm, generator):
        table.update({name: value for name, value in changes.items() if name in table})
    trainer = SimpleNamespace(
        algorithm=SimpleNamespace(**algorithm, off_policy_correction=SimpleNamespace(**correction))
    )
    return SimpleNamespace(trainer=trainer, generator=SimpleNamespace(**generator))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_wise_trajectories", False),
        ("temperature", 0.7),
        ("use_kl_loss", True),
        ("use_kl_in_reward", True),
        ("use_entropy_loss", True),
        ("advantage_batch_normalize", True),
        ("policy_loss_type", "gspo"),
        ("tis_ratio_type", "sequence"),
        ("sequence_mask_metric", "product"),
        ("apply_overlong_filtering", True),
        ("zero_reward_on_non_stop", True),
    ],
)
def test_settings_that_sessions_of_several_traces_do_not_stand(name: str, value: Any) -> None:
    check_config(configuration())
    with pytest.raises(ConfigError, match=rf"^Set [a-z_.]+{name}="):
        check_config(configuration(**{name: value}))
