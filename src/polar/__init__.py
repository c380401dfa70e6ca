"""Polar: reinforcement learning for language agents, without opening the agent."""
