"""To be imported before AReaL: loggers and pictures, which are not used here, are not installed."""

import absent

absent.packages("swanlab", "trackio", "tensorboardX", "pybase64")
