"""A vLLM server through a capturing gateway, and without it."""
