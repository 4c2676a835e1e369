"""The filter in memory says "no" only of keys that cannot be on the disk, and seldom "maybe" of those."""

from hashlib import sha256

from edge import known_keys
from edge.known_keys import KeyFilter, KnownKeys


def keys(kind: str, count: int) -> list[str]:
    return [sha256(f"{kind} {number}".encode()).hexdigest() for number in range(count)]


def test_what_was_added_may_be_there_and_hardly_anything_else() -> None:
    one = KeyFilter()
    for key in (mine := keys("mine", 20_000)):
        one.add(key)
    assert all(map(one.may_have, mine))
    assert sum(map(one.may_have, keys("other", 20_000))) < 20  # (1 - exp(-4 * 20,000 / 2^22))^4: none is expected


def test_a_row_under_no_key_of_ours_is_passed_over() -> None:
    one = KeyFilter()
    for text in ("", "planted", "0x" * 12):
        one.add(text)
    assert one.count == 0


def test_a_key_is_known_through_every_change_of_filters() -> None:
    known, [a, b, c, d, new] = KnownKeys(), keys("k", 5)
    assert known.may_have(new)  # the database has not been read through
    read = KeyFilter()
    read.add(a)
    known.add(b)
    known.replace(read, known.older)
    assert (known.may_have(a), known.may_have(b), known.may_have(new)) == (True, True, False)

    known._written.count = known_keys.FULL
    assert known.add(c)  # c's write comes after those of `older`
    assert not known.add(d)
    assert all(map(known.may_have, (a, b, c, d)))
    reading = known.older
    known.replace(KeyFilter(), None)  # a reading that began before: what it saw is no reason to drop b
    assert known.may_have(b)
    read_again = KeyFilter()  # a and b have been evicted since
    known.replace(read_again, reading)
    assert [known.may_have(key) for key in (a, b, c, d)] == [False, False, True, True]
    known.forget()
    assert known.may_have(new)
