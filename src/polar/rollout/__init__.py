"""What trainers and tasks speak of: the wire models of the rollout service."""
