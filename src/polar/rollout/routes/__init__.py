"""The control plane over HTTP, one module a group of routes. They check what comes in and say what comes out;
`rollout.Rollout` decides."""
