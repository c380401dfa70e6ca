"""verl: Polar's sessions in verl's own training loop (`verl.trainer.main_ppo`, its V1 trainer, which is the default).

    VERL_USE_EXTERNAL_MODULES=polar.bridges.verl.trainer python -m verl.trainer.main_ppo \\
        trainer.v1.trainer_mode=polar_sync \\
        actor_rollout_ref.rollout.agent.agent_loop_config_path=polar.yaml \\
        data.train_files=tasks.parquet data.val_files=tasks.parquet \\
        algorithm.adv_estimator=grpo actor_rollout_ref.actor.loss_agg_mode=token-mean ...

    # polar.yaml
    - name: polar
      _target_: polar.bridges.verl.AgentLoop
      settings: {server: "http://127.0.0.1:8080", tasks: [tasks/], name: run-1}

A row of the data (`build_rows` makes them of tasks) names a task; verl asks its agent loop `polar` for each of the
prompt's `rollout.n` sessions, and gets a list of outputs: one for each trace. They go the way that verl has for
sessions of several outputs: rows of its queue under `uid_session_index`.

Why an agent loop and not a manager of our own: verl's worker has all sessions of a prompt in one process, so they can
be one Polar group, and everything behind (queue, replay buffer, staleness, checkpoints) stays verl's own code.

Who divides: verl. Its GRPO computes one advantage a session, from its last row, and gives it to all of them. Rows have
no weights, so only a mean (or sum) over tokens is indifferent to how a session was split; `polar_*` trainer modes
(`polar.bridges.verl.trainer`) refuse the others. `weight` is not applied by anybody; it is in `extra_fields`.

What is left out: sessions without a reward, stale ones, and those with nothing to train. The group is smaller then;
where nothing is left of it, or a single one of several, whose advantage verl would make of its bare reward, it is a
failed one, which verl replaces as its settings say. Pictures, which verl would need beside the tokens, don't come with
a trace. The experts that tokens were routed to do, where rollout.enable_rollout_routing_replay asks for them.
"""

from polar.bridges.verl.agent_loop import AgentLoop, build_rows

__all__ = ["AgentLoop", "build_rows"]
