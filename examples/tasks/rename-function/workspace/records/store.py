_RECORDS = {}


def get(key):
    """The record of that key, or None."""
    return _RECORDS.get(key)


def save(key, value):
    _RECORDS[key] = value
