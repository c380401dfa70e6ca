"""NeMo Gym starts this as `polar_agent`: each run is a session of Polar."""

from polar.bridges.nemo_gym import agent_class

PolarAgent = agent_class()

if __name__ == "__main__":
    PolarAgent.run_webserver()
