"""An engine of our own: a Hugging Face model in a process beside ours, which speaks vLLM's HTTP API.

    api_server ─► EngineCore (core.py) ─► Batcher (batcher.py), the model's own thread ─► sampler.py ─► tokens
        ▲              generation.py          kv_cache.py, attention.py                                   │
        └─────────────────────────────────────────────────────────────────────────────────────────────────┘

Made for training: prompts and replies are token ids, each token has its log-probability and the version of the weights
that sampled it, and weights are replaced in place (`POST /update_weights`). No key or value that older weights computed
outlives them.
"""
