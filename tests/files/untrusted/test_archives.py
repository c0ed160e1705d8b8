"""Zip and tar: what they hold comes out, or nothing does."""

import gzip
import io
import lzma
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bounded_child import run_bounded

from bert_jax.errors import UserError
from bert_jax.files.untrusted.archives import extract_tar, extract_zip

IMPORTS = "from bert_jax.files.untrusted.archives import extract_tar, extract_zip"
FILES = {"CoLA/train.tsv": b"a\tb\n" * 1000, "CoLA/original/raw/x.txt": b"", "README": b"\0\xff"}


def make_zip(path: Path, files: Any, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items() if isinstance(files, dict) else files:
            info = name if isinstance(name, zipfile.ZipInfo) else zipfile.ZipInfo(name)
            info.compress_type = method
            archive.writestr(info, data)
    return path


def make_tar(path: Path, files: Any, mode: str = "w", **options: Any) -> Path:
    with tarfile.open(path, mode, **options) as archive:
        for name, data in files.items() if isinstance(files, dict) else files:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(data))
    return path


def make_tgz(path: Path, files: Any) -> Path:
    return make_tar(path, files, "w:gz")


Make = Callable[[Path, Any], Path]
KINDS: dict[str, tuple[Make, Any]] = {
    "zip": (make_zip, extract_zip),
    "stored": (lambda p, f: make_zip(p, f, zipfile.ZIP_STORED), extract_zip),
    "tar": (make_tar, extract_tar),
    "tgz": (make_tgz, extract_tar),
}
EACH = pytest.mark.parametrize("kind", KINDS)


def refused(extract: Any, path: Path, **options: Any) -> str:
    """The message; nothing may be left beside the archive."""
    target = path.parent / "target"
    before = sorted(os.listdir(path.parent))
    with pytest.raises(UserError) as caught:
        extract(path, target, **options)
    assert sorted(os.listdir(path.parent)) == before
    assert str(path) in str(caught.value) or str(target) in str(caught.value)
    return str(caught.value)


def content(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_what_a_killed_process_of_the_same_number_left_is_removed(tmp_path):
    """The first process of a container always has number 1."""
    left = tmp_path / f"target.tmp-{os.getpid()}"
    left.mkdir()
    (left / "half").write_bytes(b"")
    extract_zip(make_zip(tmp_path / "a.zip", {"whole": b"data"}), tmp_path / "target")
    assert content(tmp_path / "target") == {"whole": b"data"}
    assert not left.exists()


@EACH
def test_unpacks(tmp_path, kind):
    make, extract = KINDS[kind]
    names = extract(make(tmp_path / "a", FILES), tmp_path / "deep" / "target")
    assert names == sorted(FILES)
    assert content(tmp_path / "deep" / "target") == FILES
    assert os.listdir(tmp_path / "deep") == ["target"]


@EACH
def test_an_existing_target_is_left_alone(tmp_path, kind):
    make, extract = KINDS[kind]
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_bytes(b"x")
    assert "exists; name a directory" in refused(extract, make(tmp_path / "a", FILES))
    assert content(tmp_path / "target") == {"mine": b"x"}


BAD_NAMES = [
    "../x", "a/../../x", "..", "a/..", "/etc/x", "//x", "a//b", "./../x", "a/./b", "..\\x",
    "a\\b", "C:\\x", "C:x", "a\nb", "\x1b[2Jx", "\u2028", "x" * 513, "x" * 256, "é" * 128,
    "/".join("a" * 17),
]  # fmt: skip


@EACH
@pytest.mark.parametrize("name", BAD_NAMES)
def test_names(tmp_path, kind, name):
    make, extract = KINDS[kind]
    told = refused(extract, make(tmp_path / "a", {"good": b"1", name: b"2"}))
    assert "the name" in told


def test_nul_in_a_zip_name(tmp_path):
    # zipfile shows the part before the NUL; other programs see the rest.
    path = make_zip(tmp_path / "a", {"goodXevil": b"1"})
    path.write_bytes(path.read_bytes().replace(b"goodX", b"good\0"))
    assert "control character" in refused(extract_zip, path)


@EACH
def test_names_that_only_look_encoded_are_taken_as_they_are(tmp_path, kind):
    make, extract = KINDS[kind]
    names = ["%2e%2e%2fx", "..%5cx", "&#46;&#46;", "\uff0e\uff0e", "..."]
    files = {name: name.encode() for name in names}
    extract(make(tmp_path / "a", files), tmp_path / "target")
    assert content(tmp_path / "target") == files


@EACH
def test_archives_inside_stay_packed(tmp_path, kind):
    make, extract = KINDS[kind]
    inner = make(tmp_path / "inner", {"../x": b"1"}).read_bytes()
    extract(make(tmp_path / "a", {"inner.zip": inner}), tmp_path / "target")
    assert content(tmp_path / "target") == {"inner.zip": inner}


@EACH
@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("a/b", "a/b", "twice"),
        ("a/b", "A/B", "twice"),
        ("\u00e9", "e\u0301", "twice"),
        ("a", "a/b", "as a file and as a directory"),
        ("a/b", "a", "as a file and as a directory"),
        ("a/b", "A", "as a file and as a directory"),
    ],
)
def test_duplicates(tmp_path, kind, first, second, message):
    make, extract = KINDS[kind]
    assert message in refused(extract, make(tmp_path / "a", [(first, b"1"), (second, b"2")]))


def test_directories_may_repeat(tmp_path):
    files = [("./", b""), ("a/", b""), ("a/b", b"1"), ("a/", b"")]
    with pytest.warns(UserWarning, match="Duplicate"):
        make_zip(tmp_path / "a", files)
    assert extract_zip(tmp_path / "a", tmp_path / "target") == ["a/b"]
    infos = []
    for name, data in files:
        info = tarfile.TarInfo(name.rstrip("/") or ".")
        info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
        infos.append((info, data))
    make_tar(tmp_path / "b", infos)
    assert extract_tar(tmp_path / "b", tmp_path / "target2") == ["a/b"]


@pytest.mark.parametrize("mode", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK])
def test_links_and_devices_in_a_zip(tmp_path, mode):
    link = zipfile.ZipInfo("link")
    link.external_attr = (mode | 0o777) << 16
    path = make_zip(tmp_path / "a", [(link, b"/etc"), ("link/passwd", b"x")])
    assert "'link' is a link or device" in refused(extract_zip, path)


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE,
     tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, b"Z"],
)  # fmt: skip
def test_links_and_devices_in_a_tar(tmp_path, kind):
    link = tarfile.TarInfo("link")
    link.type, link.linkname = kind, "/etc"
    path = make_tar(tmp_path / "a", [("good", b"x"), (link, b""), ("link/passwd", b"x")])
    assert re.search(
        "'link' is a link, device or sparse file|not a sound", refused(extract_tar, path)
    )


def test_modes_are_not_taken_over(tmp_path):
    info = tarfile.TarInfo("run")
    info.mode = 0o6777
    extract_tar(make_tar(tmp_path / "a", [(info, b"x")]), tmp_path / "target")
    assert (tmp_path / "target" / "run").stat().st_mode & 0o7111 == 0


@EACH
def test_limits(tmp_path, kind):
    make, extract = KINDS[kind]
    path = make(tmp_path / "a", {str(i): bytes(100_000) for i in range(10)})
    assert "more than 9 entries" in refused(extract, path, max_files=9)
    assert "limit of 999,999 bytes" in refused(extract, path, max_bytes=999_999)
    extra = 0 if kind in ("zip", "stored") else 100_000  # tar's own headers count
    assert len(extract(path, tmp_path / "t", max_files=10, max_bytes=1_000_000 + extra)) == 10


@pytest.mark.parametrize("kind", ["zip", "tgz"])
def test_ratio(tmp_path, kind):
    make, extract = KINDS[kind]
    path = make(tmp_path / "a", {"a": bytes(40_000_000)})
    told = refused(extract, path)
    assert f"for an archive of {path.stat().st_size:,}" in told
    assert extract(path, tmp_path / "t", max_ratio=2000) == ["a"]


def test_a_compressed_tar_is_bounded_while_it_is_decompressed(tmp_path):
    # Zeros are an archive without members: nothing that looks at members refuses them.
    (tmp_path / "a").write_bytes(gzip.compress(bytes(5_000_000)))
    assert "limit of 1,000,000 bytes" in refused(extract_tar, tmp_path / "a", max_bytes=1_000_000)


def test_a_zip_that_declares_less_than_it_holds(tmp_path):
    path = make_zip(tmp_path / "a", {"a": bytes(30_000_000)})
    raw = path.read_bytes()
    path.write_bytes(raw.replace(struct.pack("<I", 30_000_000), struct.pack("<I", 10)))
    assert "not a sound archive" in refused(extract_zip, path)


def test_a_zip_that_declares_more_than_it_holds(tmp_path):
    path = make_zip(tmp_path / "a", {"a": bytes(1000)})
    raw = path.read_bytes()
    path.write_bytes(raw.replace(struct.pack("<I", 1000), struct.pack("<I", 2000)))
    assert re.search(r"declares 2,000 bytes and has 1,000|not a sound", refused(extract_zip, path))


def test_overlapping_entries(tmp_path):
    # Fifield's bomb: many entries of the directory share the bytes of one.
    kernel = zlib.compress(bytes(1 << 22), 9)[2:-4]
    local = struct.pack(
        "<4s5H3I2H", b"PK\3\4", 20, 0, 8, 0, 0, zlib.crc32(bytes(1 << 22)), len(kernel), 1 << 22,
        1, 0,
    ) + b"a" + kernel  # fmt: skip
    directory = b"".join(
        struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 8, 0, 0, zlib.crc32(bytes(1 << 22)),
                    len(kernel), 1 << 22, 1, 0, 0, 0, 0, 0, 0) + bytes([97])
        for _ in range(1000)
    )  # fmt: skip
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1000, 1000, len(directory), len(local), 0)
    (tmp_path / "a").write_bytes(local + directory + end)
    assert "unpacks to more than the limit" in refused(extract_zip, tmp_path / "a")


def test_compressions_and_encryption(tmp_path):
    path = make_zip(tmp_path / "a", FILES, zipfile.ZIP_LZMA)
    assert "the compression 14" in refused(extract_zip, path)
    path = make_zip(tmp_path / "a", {"x": b"y"})
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"PK\1\2") + 8] |= 1
    path.write_bytes(raw)
    assert "decrypt the archive first" in refused(extract_zip, path)
    (tmp_path / "a").write_bytes(lzma.compress(b"x"))
    assert "decompress it first" in refused(extract_tar, tmp_path / "a")


@EACH
def test_damage(tmp_path, kind):
    make, extract = KINDS[kind]
    raw = make(tmp_path / "a", FILES).read_bytes()
    # The zeros at the end of a tar are padding of which the first block is needed.
    whole = len(raw) if kind in ("zip", "stored", "tgz") else len(raw.rstrip(b"\0")) + 500
    for size in [*range(0, whole, whole // 50 + 1), whole - 1]:
        (tmp_path / "a").write_bytes(raw[:size])
        refused(extract, tmp_path / "a")
    (tmp_path / "a").write_bytes(b"garbage " * 1000)
    refused(extract, tmp_path / "a")
    assert "no such file" in refused(extract, tmp_path / "b")


def test_a_tar_with_a_damaged_header_in_the_middle(tmp_path):
    raw = bytearray(make_tar(tmp_path / "a", {"a": b"1" * 600, "b": b"2"}).read_bytes())
    raw[1536 + 100] ^= 1  # of the second header; tarfile says nothing
    (tmp_path / "a").write_bytes(raw)
    assert "no end-of-archive mark at byte 1,536" in refused(extract_tar, tmp_path / "a")


def long_header(size: int, kind: bytes = b"x", data: bytes = b"") -> bytes:
    info = tarfile.TarInfo("h")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.USTAR_FORMAT) + data


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_extended_headers_in_bounded_memory(tmp_path, kind):
    with open(tmp_path / "a", "wb") as file:
        file.write(long_header(1 << 32, kind))
        file.truncate(1 << 33)  # sparse
    with gzip.open(tmp_path / "b", "wb", compresslevel=1) as packed:
        packed.write(long_header(1 << 29, kind))
        for _ in range(256):
            packed.write(bytes(1 << 20))
    for name in "ab":
        told = run_bounded(
            "extract_tar(sys.argv[1], sys.argv[2], max_ratio=10_000)",
            tmp_path / name, tmp_path / "target", imports=IMPORTS, extra=128 << 20,
        )  # fmt: skip
        assert "a header or directory has more than 65,536 bytes" in told
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_chains_of_extended_headers(tmp_path):
    record = b"30 path=" + b"a" * 21 + b"\n"
    for kind, data in ((b"x", record), (b"L", b"name\0"), (b"g", record)):
        block = long_header(len(data), kind, data.ljust(512, b"\0"))
        (tmp_path / "a").write_bytes(block * 20_000 + bytes(1024))
        assert re.search("not a sound|a header or directory", refused(extract_tar, tmp_path / "a"))


def test_a_negative_size(tmp_path):
    # CVE-2025-8194: the reader goes back and reads the same member for ever.
    info = tarfile.TarInfo("a")
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 10 + b"\xfe\x00"  # -512, base 256
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    (tmp_path / "a").write_bytes(bytes(block) + bytes(1024))
    assert "not a sound archive" in refused(extract_tar, tmp_path / "a")


def test_a_zip_directory_in_bounded_memory(tmp_path):
    one = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0)
    directory = (one + b"a") * 2_000_000
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, 0, len(directory), 0, 0)
    (tmp_path / "a").write_bytes(directory + end)
    told = run_bounded(
        "extract_zip(sys.argv[1], sys.argv[2])", tmp_path / "a", tmp_path / "target",
        imports=IMPORTS, extra=256 << 20,
    )  # fmt: skip
    assert "a header or directory has more than" in told


@EACH
def test_a_full_disk_leaves_nothing_and_stays_an_os_error(tmp_path, kind, monkeypatch):
    make, extract = KINDS[kind]
    path = make(tmp_path / "a", FILES)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bert_jax.files.untrusted.archives.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        extract(path, tmp_path / "target")
    assert os.listdir(tmp_path) == ["a"]


@EACH
def test_many_files(tmp_path, kind):
    # What is counted as headers begins anew with each file.
    make, extract = KINDS[kind]
    files = {f"{'long' * 40}/{i}": b"x" for i in range(300)}
    assert len(extract(make(tmp_path / "a", files), tmp_path / "target")) == 300


def test_headers_for_the_whole_archive_are_few(tmp_path):
    data = b"".join(b"13 k%04d=abc\n" % i for i in range(1500))
    data += bytes(-len(data) % 512)
    header = long_header(1500 * 13, b"g", data)
    member = make_tar(tmp_path / "a", {"a": b"1"}).read_bytes()
    (tmp_path / "a").write_bytes(header + member)
    assert "not a sound archive: the header of 'a'" in refused(extract_tar, tmp_path / "a")
