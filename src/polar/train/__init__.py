"""The reference trainer: GRPO over the rollout service.

settings                              one file
running ─► launching                  from settings to a model; the service as a child
   trainer ─► rollouts ─► groups      the loop; what was sampled, as trees with columns
           ─► batch ─► grpo           advantages, and the loss
           ─► learner ─► passes       each unique token through the model once (forest, cutting, attention, recurrent)
           ─► checkpoint, metrics     what is kept and told
           ─► weights ─► sync         new weights into the engines
"""

import os

# Chunks have all lengths, and what one leaves free in pieces is of use to the next only if the allocator can join it.
# PyTorch reads this when a GPU is used for the first time.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
