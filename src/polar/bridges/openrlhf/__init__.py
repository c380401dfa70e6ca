"""OpenRLHF: an agent executor whose samples are Polar's sessions, and the trainer's side of it.

    POLAR_BRIDGE=bridge.toml python -m polar.bridges.openrlhf \\
        --data.prompt_dataset rows.jsonl --data.input_key prompt --data.label_key task_id \\
        --rollout.batch_size 16 --rollout.n_samples_per_prompt 8 --train.batch_size 256 \\
        --algo.advantage.estimator group_norm --actor.model_name_or_path ... (and the rest of train_ppo_ray's)

is `python -m openrlhf.cli.train_ppo_ray` with `polar.bridges.openrlhf.agent` as its agent. The label of a row names a
task; its prompt is only logged. OpenRLHF's engines live inside Ray actors, where nobody else can reach them: the
executor runs there, and serves its engine to Polar.

Who divides: OpenRLHF, by all tokens that train in an optimizer step; `weight` is not applied. A rollout is one step:
`--train.batch_size` is how many rows there may be in it, at least as many as traces.

What is left out: sessions without a reward. Advantages are over the others of the group, as if it had been that small;
a session that is alone has none. In an evaluation, a prompt without any session that has a reward counts for no mean,
and the log says how many there were. A trace longer than `--data.max_len` is an error, not cut, and so are
log-probabilities of another temperature than the trainer's. Policy versions are not in OpenRLHF's rows. Not taken:
`--train.async_enable` (its actors are made where nothing can be put in their place), dynamic batches, critics, and
whatever goes by rows.
"""
