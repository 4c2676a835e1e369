"""Ranges that follow one another in a file travel as one, whatever the transport; and answers made whole again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from sync.agent.ports import Part, Range


def joined(ranges: Sequence[Range]) -> list[list[Range]]:
    """In the same order; what goes to the end of a file stays alone."""
    groups: list[list[Range]] = []
    for one in ranges:
        last = groups[-1][-1] if groups else None
        if last and last.length and one.length and (last.name, last.offset + last.length) == (one.name, one.offset):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def whole(parts: Iterable[Part]) -> Iterator[bytes | None]:
    """Each range's bytes; None where there is no such file, or less of it."""
    data = bytearray()
    for part in parts:
        data += part.data
        if part.is_last:
            yield None if part.is_missing else bytes(data)
            data.clear()
