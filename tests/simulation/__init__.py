"""Seeded schedules of the rollout service: the production server, queue and workers in a simulated world."""
