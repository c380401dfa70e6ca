"""How busy the node's stages keep an engine."""
