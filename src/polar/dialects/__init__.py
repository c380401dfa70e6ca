"""Wire formats. See `base` for what a dialect is."""
