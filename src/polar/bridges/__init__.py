"""Polar's rollouts in other trainers' loops: a module for each trainer, thin over the client.

    trainer's loop ─► bridge ─► Rollouts ─► polar.AsyncClient ─► the service
                        │          └─► Items (sessions as traces) ─► export's rows ─► the trainer's own types
                        └─► Engines: the trainer's engines, their version, pauses, and the proof of their weights

A trainer is imported inside the functions of its own module alone: `import polar.bridges.verl` works without verl.
"""
