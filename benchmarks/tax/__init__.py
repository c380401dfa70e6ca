"""What capturing takes from an engine's throughput."""
