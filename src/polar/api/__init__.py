"""What Python programs call without a server: `polar.run` and `polar.capture`.

    run      tasks ─► LocalRollout (private gateway, node) ─► SessionResults
    capture  program ─► CaptureSession (private gateway, one session) ─► SessionResult

Each starts a gateway of its own on loopback. `polar.Client` is for a service that runs elsewhere.
"""
