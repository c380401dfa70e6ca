"""Tasks as they are written: files of several formats, and Harbor's folders."""

from polar.tasks.reader import read, read_sources

__all__ = ["read", "read_sources"]
