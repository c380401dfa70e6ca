from records.cache import Cache
from records.store import load_record, save

__all__ = ["Cache", "load_record", "save"]
