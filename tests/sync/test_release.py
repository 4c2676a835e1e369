from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from common.bundle import Variant
from common.errors import BadRelease, IncompatibleRelease
from sync.release import (
    Desired,
    FileEntry,
    Manifest,
    SlabEntry,
    check_manifest,
    parse_manifest,
    read_desired,
    read_manifest,
    shared_files,
    to_bytes,
)
from tests.sync.fakes import bundle_spec

ID = "ab" * 32


def slab(*pieces: tuple[int, int], id: str = ID) -> SlabEntry:
    return SlabEntry(id=id, key="s/0", width=1, mantissa=0, pieces=pieces)


def file(path: str = "full/m.bin", *slabs: SlabEntry, size: int = 4) -> FileEntry:
    return FileEntry(path=path, size=size, digest=ID, tensors=(), slabs=slabs or (slab((0, 4)),))


def manifest(*files: FileEntry) -> Manifest:
    return Manifest(
        model="digits",
        version="3",
        parent="2",
        files=files or (file(),),
        shared=(),
        variants=(Variant(name="full", files={"torch": ("full/m.bin",)}),),
    )


def desired_of(one: Manifest, **changes: object) -> Desired:
    fields = {
        "model": one.model,
        "epoch": 1,
        "version": one.version,
        "digest": one.digest(),
        "manifest": f"releases/{one.model}/{one.version}.json",
        "manifest_hash": blake3(to_bytes(one)).hexdigest(),
    }
    return Desired(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_manifest_survives_the_wire() -> None:
    one = manifest()
    assert read_manifest(to_bytes(one), desired_of(one)) == one


def test_the_digest_is_that_of_the_content_whatever_the_version() -> None:
    one = manifest()
    assert replace(one, version="9", parent="3").digest() == one.digest()
    assert manifest(replace(file(), digest="cd" * 32)).digest() != one.digest()


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a\0b", "a\\b"])
def test_file_names_stay_inside_the_release(path: str) -> None:
    with pytest.raises(BadRelease):
        check_manifest(manifest(file(), file(path)))


@pytest.mark.parametrize(
    "slabs",
    [
        [slab((0, 3))],
        [slab((0, 4), (2, 2))],
        [slab((0, 2), (3, 1))],
        [slab((0, 5))],
        [slab((0, 4), (4, 0))],
        [slab((-1, 1), (0, 4))],
        [slab((0, 4), id="../../../etc")],
        [slab((0, 4), id=ID.upper())],
    ],
)
def test_slabs_give_every_byte_exactly_once(slabs: list[SlabEntry]) -> None:
    with pytest.raises(BadRelease):
        check_manifest(manifest(file("full/m.bin", *slabs)))


def test_an_absurd_slab_is_refused() -> None:
    with pytest.raises(BadRelease):
        check_manifest(manifest(file("full/m.bin", slab((0, 1 << 40)), size=1 << 40)))


@pytest.mark.parametrize("kind", [(3, 0), (2, 8), (1, 23), (8, 0), (4, -1)])
def test_elements_of_no_known_kind_are_refused(kind: tuple[int, int]) -> None:
    width, mantissa = kind
    with pytest.raises(BadRelease):
        check_manifest(manifest(file("full/m.bin", replace(slab((0, 4)), width=width, mantissa=mantissa))))


def test_a_variant_cannot_name_a_file_that_is_not_there() -> None:
    with pytest.raises(BadRelease):
        check_manifest(manifest(file("other")))


def test_a_later_format_is_incompatible_not_malformed() -> None:
    data = to_bytes(replace(manifest(), format=2))
    with pytest.raises(IncompatibleRelease, match="format 2"):
        parse_manifest(data, "digits/3")


def test_the_manifest_must_be_the_one_desired() -> None:
    one = manifest()
    for wrong in ({"manifest_hash": ID}, {"digest": ID}, {"version": "4"}, {"model": "other"}):
        with pytest.raises(BadRelease):
            read_manifest(to_bytes(one), desired_of(one, **wrong))


@pytest.mark.parametrize(
    "changes", [{"epoch": 0}, {"version": "3a"}, {"version": "0"}, {"manifest": "releases/x/3.json"}]
)
def test_malformed_desired_state_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadRelease):
        read_desired(to_bytes(desired_of(manifest(), **changes)), "digits")


@pytest.mark.parametrize("model", ["..", ".hidden", "a/b", "", "a" * 200, "a b"])
def test_a_model_name_is_safe_as_a_folder(model: str) -> None:
    with pytest.raises(BadRelease):
        read_desired(to_bytes(desired_of(replace(manifest(), model=model))), model)


@given(data=st.binary(max_size=200))
def test_garbage_is_a_bad_release(data: bytes) -> None:
    with pytest.raises(BadRelease):
        parse_manifest(data, "digits/3")


def test_a_manifest_has_at_most_64_mib() -> None:
    with pytest.raises(BadRelease, match="at most 67108864"):
        parse_manifest(bytes((64 << 20) + 1), "digits/3")


@given(
    value=st.recursive(
        st.none() | st.integers() | st.text(max_size=5), lambda x: st.dictionaries(st.text(max_size=8), x)
    )
)
def test_any_other_json_is_a_bad_release(value: object) -> None:
    with pytest.raises(BadRelease):
        parse_manifest(msgspec.json.encode(value), "digits/3")


def test_shared_files_are_those_of_no_variant() -> None:
    assert shared_files(bundle_spec("digits")) == ("bundle.json", "golden.safetensors", "labels.txt")
