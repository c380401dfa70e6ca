import records
from records import Cache, get


def line(key):
    record = get(key) or {}
    return f"{key}: {record.get('title', 'unknown')}"


def cached(keys):
    cache = Cache()
    return [cache.get(key) for key in keys]


def titles(keys):
    return [records.get(key)["title"] for key in keys]
