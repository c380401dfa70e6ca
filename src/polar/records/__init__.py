"""The shared records: what everybody hands on, imported by every package and importing only the lowest modules.

    task -> session -> exchange (a model call) -> trajectory (traces or a tree) -> result

`task` and `result` are documents that users and bridges write and read (pydantic); `session`, `exchange` and
`trajectory` are what the store and the builders hold (msgspec, numpy). `wire` writes trajectories as JSON.
"""
