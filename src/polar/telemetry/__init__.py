"""What operators see of a running Polar: its log, its metrics, and traces for those who collect them."""
