"""Rollouts that others made: are their tokens trained in the context that they were sampled in?

    file -> formats -> rows, their form checked -> recomputed log-probabilities -> comparison -> audit -> report

A trainer's dump has ids, a mask and log-probabilities, and nothing of how they came about. But a token that was sampled
in one context and stands in another gives itself away: the model says something else of it than was recorded. What
kind of mistake it is shows in where tokens are off: see `rows.PROBLEM_KINDS`.
"""
