"""What the automatic check of sessions costs."""
