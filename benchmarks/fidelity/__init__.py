"""Whether what is trained on was sampled so, with real harnesses."""
