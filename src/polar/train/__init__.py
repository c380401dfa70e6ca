"""The reference trainer: GRPO over the rollout service.

settings                              one file
run ─► service_process                from settings to a model; the service as a child
   trainer ─► rollouts ─► groups      the loop; what was sampled, as trees with columns
           ─► batch ─► grpo           advantages, and the loss
           ─► learner ─► packing      trees packed, and cut into chunks (memory: how much of them fits)
                      ─► passes       each unique token through the model once (attention, flash, recurrent)
           ─► checkpoint, metrics     what is kept and reported
           ─► polar.weight_sync       new weights into the engines
"""
