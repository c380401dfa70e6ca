"""What capturing a call costs: CPU, latency, streams and memory, against other proxies."""
