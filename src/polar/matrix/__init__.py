"""Served models over harnesses, on the same tasks: a table of pass@1, which an interruption doesn't end."""
