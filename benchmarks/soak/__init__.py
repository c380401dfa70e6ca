"""Whether the service's memory stops growing."""
