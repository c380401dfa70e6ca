from records import store


class Cache:
    """Remembers what was loaded before."""

    def __init__(self):
        self._known = {}

    def get(self, key):
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = store.load_record(key)
        return found
