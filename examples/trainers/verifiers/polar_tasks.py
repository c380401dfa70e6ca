"""verifiers finds this by the taskset's id, `polar-tasks`; POLAR_BRIDGE names the file with the bridge's settings."""

from polar.bridges.verifiers import plugin

PolarTaskset, PolarEnv, PolarHarness = plugin()
__all__ = ["PolarEnv", "PolarHarness", "PolarTaskset"]
