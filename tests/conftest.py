"""What all tests have in common."""

import os

# Where no engine is named it would be the embedded one, whose model takes a while to fetch and to load.
os.environ.setdefault("POLAR_ENGINE__KIND", "scripted")
