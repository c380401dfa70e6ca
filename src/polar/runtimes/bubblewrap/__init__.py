"""Sandboxes by bubblewrap: see `backend`."""

from polar.runtimes.bubblewrap.backend import Bubblewrap, BubblewrapRuntime

__all__ = ["Bubblewrap", "BubblewrapRuntime"]
