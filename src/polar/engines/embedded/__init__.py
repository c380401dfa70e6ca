"""An engine of our own: a Hugging Face model in a process beside ours, which speaks vLLM's HTTP API.

    request ─ asking.py ─► Generation ─ core.py ─► batching.py, the model's own thread ─ choosing.py ─► tokens
                               ▲                       slots.py, attention.py                             │
    replies.py ◄───────────────┴──────────────────────────────────────────────────────────────────────────┘

Made for training: prompts and replies are token ids, each token has its log-probability and the version of the weights
that sampled it, and weights are replaced in place (`POST /update_weights`). No key or value that older weights computed
outlives them.
"""
