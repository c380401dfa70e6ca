"""Polar's rollouts in other trainers' loops: a module or package for each trainer, thin over the client.

    trainer's loop ─► bridge ─► RolloutClient ─► polar.AsyncClient ─► the service
                        │           └─► sessions as traces ─► export's rows ─► the trainer's own types
                        └─► WeightUpdater: the trainer's engines, their version, pauses, and the proof of their weights

`bridge.py` says what a bridge is. A trainer is imported inside the functions of its own module alone: `import
polar.bridges.verl` works without verl.
"""
