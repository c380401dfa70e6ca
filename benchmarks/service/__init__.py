"""Throughput of the rollout service, reading of results, and long queues."""
