"""TRL: Polar's sessions as the rollouts of GRPOTrainer, and of its asynchronous one.

    from trl import GRPOConfig
    from polar.bridges.trl import grpo_trainer

    trainer = grpo_trainer(
        {"name": "run-1", "tasks": ["tasks.jsonl"]},  # or a TOML file
        engine={"kind": "embedded"},  # gets the new weights after each step, and is probed
        model="models/small",
        args=GRPOConfig(output_dir="out", num_generations=8, per_device_train_batch_size=32),
    )
    trainer.train()

`grpo_trainer` gives a GRPOTrainer whose rows name tasks by their task_id. It takes what GRPOTrainer takes.

A session of several traces has several rows. TRL wants one completion a prompt, so a session's first trace stands where
TRL expects the session, and the others behind them all. Rewards and advantages are TRL's own, by session; each row of a
session then has the session's advantage.

Who divides: TRL, by all tokens that train (`loss_type` "dapo", its default, or "cispo"), wherever they stand. So
`weight` is not applied, and a session may be split as it likes. Losses that count rows, and ratios or masks of whole
rows, are refused. The ratio is taken against the recorded log-probabilities; where a session has none, TRL computes its
own.

A session without a reward leaves its place to a row that trains nothing, and is left out of its group's mean.

What TRL can't take: rewards of single turns, experts that were routed to, pictures. They are left out.
"""

from polar.bridges.trl.rollout_func import RolloutFunc, async_grpo_trainer, grpo_trainer, recorded_reward

__all__ = ["RolloutFunc", "async_grpo_trainer", "grpo_trainer", "recorded_reward"]
