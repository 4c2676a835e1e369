"""Where releases are kept: a folder, or a bucket with the same names. `open_store` of `stores` takes either."""

from sync.store.folder import TIMESTAMP, Store, StoredFile, index_name, is_within, object_name, pack_name

__all__ = ["TIMESTAMP", "Store", "StoredFile", "index_name", "is_within", "object_name", "pack_name"]
