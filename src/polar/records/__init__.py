"""The shared records: what one part of Polar hands to another, and to its users.

    TaskRequest -> Session -> Exchange (a model call) -> Trajectory or TreeTrajectory -> SessionResult

`task` and `result` are documents that users and bridges write and read (pydantic); `session`, `exchange` and
`trajectory` are what the store and the builders hold (msgspec, numpy). `wire` turns trajectories into the JSON of
results, and back. Everybody imports them; they import only `config`, `types` and each other. `task`, `result` and
`spans` import no array library: the client has none.
"""
