"""Plug-ins for Polar, one module each. Polar finds them by the entry points in pyproject.toml."""
