"""Data without a trainer: sessions that are collected until there are enough good ones, within a budget, and whatever
stops the run."""
