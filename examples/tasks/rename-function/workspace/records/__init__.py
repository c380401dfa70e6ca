from records.cache import Cache
from records.store import get, save

__all__ = ["Cache", "get", "save"]
