"""The process that starts everything that runs in a runtime: `process`, and the node's side of it: `client`.

The process imports this package: nothing may be imported here.
"""
