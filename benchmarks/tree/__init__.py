"""What a training step costs with each builder."""
