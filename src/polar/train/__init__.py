"""The reference trainer: GRPO over the rollout service.

settings                              one file
running ─► launching                  from settings to a model; the service as a child
   trainer ─► rollouts ─► groups      the loop; what was sampled, as trees with columns
           ─► batch ─► grpo           advantages, and the loss
           ─► learner ─► passes       each unique token through the model once (forest, cutting, attention, recurrent)
           ─► checkpoint, metrics     what is kept and told
           ─► weights ─► sync         new weights into the engines
"""
