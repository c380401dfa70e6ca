"""The queue is tested over both databases, as the store is."""

from tests.unit.store.conftest import place, server, store  # noqa: F401
