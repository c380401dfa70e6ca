pytest_plugins = ["polar.testing.fixtures"]
