"""The contract of builders, kept by those of Polar."""

from polar.plugins import load
from polar.testing import BuilderContract


class TestPerRequest(BuilderContract):
    plugin = load("builders", "per_request")


class TestPrefixMerging(BuilderContract):
    plugin = load("builders", "prefix_merging")


class TestPrefixTree(BuilderContract):
    plugin = load("builders", "prefix_tree")
    builds_tree = True
