"""The servers that are compared, each started as a process of its own."""
