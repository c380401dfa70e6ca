"""A node: tasks go in, and their sessions run in sandboxes, stage by stage."""
