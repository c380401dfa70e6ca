"""Exporters: what was sampled, as a trainer's own code takes it.

    store -> sessions -> builder -> Item -> Exporter -> bytes

One module a format, found by name (`polar.exporters`). `base` has what they share, `pipeline` brings sessions from the
store to an exporter. Sessions go through one at a time, so memory does not grow with their number; and nothing is left
out unsaid: what a format can't take is counted, with the reason.

No module here imports a trainer. Where its class can't be written as JSON, a function beside the exporter makes it from
a row, and imports the trainer when it is called.
"""
