"""Which keys may be on the disk, in memory: most look-ups of what was never asked before need not wait for the disk.

Owns the filters (Bloom's: never a false "no", seldom a false "maybe") and how they are replaced as keys come and go.
Leaves reading the keys from the database to `disk_cache.py`. No locks: each filter has one thread that writes to it.
"""

from __future__ import annotations

_MASK = (1 << 22) - 1
FULL = 1 << 19  # keys; of others, one in forty is then a maybe (half a MiB, eight bits a key)


class KeyFilter:
    """For keys that begin with 24 hexadecimal digits of a digest; what else is added is no key of ours."""

    __slots__ = ("_bits", "count")

    def __init__(self) -> None:
        self._bits = bytearray((_MASK + 1) // 8)
        self.count = 0

    def add(self, key: str) -> None:
        try:
            places = int(key[:24], 16)
        except ValueError:
            return
        self.count += 1
        for _ in range(4):
            self._bits[(places & _MASK) >> 3] |= 1 << (places & 7)
            places >>= 23

    def may_have(self, key: str) -> bool:
        places, bits = int(key[:24], 16), self._bits
        for _ in range(4):
            if not bits[(places & _MASK) >> 3] >> (places & 7) & 1:
                return False
            places >>= 23
        return True


class KnownKeys:
    """What the database had when it was last read through, and what was written since.

    While it has not been read through, every key may be there. The event loop calls `may_have` and `add`, and the
    cache's thread the others. A key counts from before its write is handed to that thread.
    """

    def __init__(self) -> None:
        self._on_disk: KeyFilter | None = None
        self._older: KeyFilter | None = None  # written before the reading that is under way began
        self._written = KeyFilter()

    def may_have(self, key: str) -> bool:
        older, on_disk = self._older, self._on_disk  # in this order: `replace` goes the other way
        if on_disk is None or self._written.may_have(key) or on_disk.may_have(key):
            return True
        return older is not None and older.may_have(key)

    def add(self, key: str) -> bool:
        """Whether it is time to read the database through again: so many keys of rows that are gone are in here."""
        is_time = self._written.count >= FULL and self._older is None and self._on_disk is not None
        if is_time:
            self._older, self._written = self._written, KeyFilter()
        self._written.add(key)
        return is_time

    def forget(self) -> None:
        """The database is another one, of which nothing is known yet."""
        self._on_disk = None

    @property
    def is_unread(self) -> bool:
        return self._on_disk is None

    @property
    def older(self) -> KeyFilter | None:
        return self._older

    def replace(self, on_disk: KeyFilter, older: KeyFilter | None) -> None:
        """`on_disk` was read after all of the keys in `older` had been written."""
        self._on_disk = on_disk
        if older is not None and self._older is older:
            self._older = None
