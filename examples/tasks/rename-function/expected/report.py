import records
from records import Cache, load_record


def line(key):
    record = load_record(key) or {}
    return f"{key}: {record.get('title', 'unknown')}"


def cached(keys):
    cache = Cache()
    return [cache.get(key) for key in keys]


def titles(keys):
    return [records.load_record(key)["title"] for key in keys]
