"""Tokens into the tree, bytes of a session on disk, and the rendering of a turn."""
