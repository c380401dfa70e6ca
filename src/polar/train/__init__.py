"""The reference trainer: GRPO over the rollout service.

settings                              the settings file
run ─► service_process                a complete run; the rollout service as a child process
   trainer ─► rollouts ─► groups      the training loop; sampled groups as token trees
           ─► batch ─► grpo           advantages and the loss
           ─► learner ─► packing      packs trees and splits them into chunks (memory: how much fits)
                      ─► tree_model   computes each unique token once (attention, flash_attention, recurrent)
           ─► checkpoint, metrics     files of the run
           ─► polar.weight_sync       new weights into the engines
"""
