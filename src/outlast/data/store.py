"""The token store on disk: `tokens.bin`, `manifest.json` and, for a Hugging Face vocabulary, `tokenizer.json`.

`tokens.bin` is a plain little-endian array, hashed in blocks so that damage can be placed and a very
large store needn't be read whole at each start. A store is written in a hidden folder beside its place
and renamed, so it is whole or absent.
"""

import contextlib
import dataclasses
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, get_origin, get_type_hints

import numpy as np
import xxhash

from outlast.errors import DataError, StorageError, UserError

VERSION = 1
TOKENS = "tokens.bin"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"

BLOCK_BYTES = 64 << 20
CHECKED_BLOCKS = 64
"""Blocks read at each open: all of a store of up to 4 GiB, else as many, spread evenly, first and last
among them. A larger store's other blocks are checked by size only."""

_READ_BYTES = 4 << 20
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@dataclass(frozen=True)
class Manifest:
    """What a store holds; `manifest.json` has these keys."""

    format_version: int
    sources: list[str]
    """For people: paths, which differ between machines, are no part of the hash."""
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    end_of_text: int
    """Id after each document; -1: the vocabulary has none."""
    dtype: str
    """Of tokens.bin: uint16 or uint32, little-endian."""
    num_tokens: int
    num_documents: int
    num_bytes: int
    """UTF-8 bytes of the documents."""
    num_skipped: int
    """Files passed over because they aren't text."""
    block_bytes: int
    blocks: list[str]
    """xxh3_128 of each block of tokens.bin."""
    hash: str
    """xxh3_128 of what decides the ids that a trainer reads and their meaning."""

    def content_hash(self) -> str:
        """What `hash` must be."""
        parts = [self.format_version, self.tokenizer_sha256, self.vocab_size, self.end_of_text]
        parts += [self.dtype, self.num_tokens, self.block_bytes, self.blocks]
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


def dtype_for(vocab_size: int) -> str:
    """The narrowest dtype that holds all ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _stored(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


# --- Writing ---------------------------------------------------------------------------------------


class TokenWriter:
    """Writes `tokens.bin` and hashes it on the way.

    Args:
        folder: where.
        dtype: of the file.
        block_bytes: size of the blocks that are hashed.
    """

    def __init__(self, folder: Path, dtype: str, block_bytes: int = BLOCK_BYTES) -> None:
        self.dtype = _stored(dtype)
        self.num_tokens = 0
        self.block_bytes = block_bytes
        self._file = (folder / TOKENS).open("wb")
        self._blocks: list[str] = []
        self._block = xxhash.xxh3_128()
        self._room = block_bytes

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def write(self, ids: np.ndarray) -> None:
        """Append ids, `[n]`, integers that the dtype holds."""
        data = memoryview(ids.astype(self.dtype).tobytes())
        self._file.write(data)
        self.num_tokens += len(ids)
        while len(data):
            part, data = data[: self._room], data[self._room :]
            self._block.update(part)
            self._room -= len(part)
            if not self._room:
                self._end_block()

    def finish(self) -> list[str]:
        """Bring everything to disk; the hash of each block."""
        if self._room < self.block_bytes:
            self._end_block()
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._blocks

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block.reset()
        self._room = self.block_bytes


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`."""
    with (folder / MANIFEST).open("w", encoding="utf-8") as f:
        json.dump(dataclasses.asdict(manifest), f, indent=1)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())


@contextlib.contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """A hidden folder beside `place`, to be written and then given to `install`; gone afterwards.

    What processes that were killed have left beside `place` is removed first. A lock on the folder, which
    the system releases with its process, tells those from folders still being written.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError:  # its words would say that it exists, not that it isn't a folder
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    _sweep(place)
    folder, lock = _locked_folder(place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def install(folder: Path, place: Path) -> bool:
    """Rename a finished folder to its place; False if something is there already."""
    try:
        folder.rename(place)  # replaces an empty folder, never another
    except OSError as e:
        if e.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def inode(place: Path) -> int | None:
    """Inode number of what is at a place; None: nothing."""
    try:
        return place.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise write_error(place, e) from None


def discard(place: Path, number: int | None) -> None:
    """Remove the folder that has this inode number from its place, at once; nothing if another is there now.

    Raises:
        DataError: it can't be removed.
    """
    aside = _hidden(place)
    try:
        if inode(place) == number:
            place.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    except FileNotFoundError:
        pass  # another process was faster
    except OSError as e:
        raise write_error(place, e) from None


def write_error(place: Path, e: OSError) -> UserError:
    """The error for a place that couldn't be written."""
    if e.errno in _DISK_ERRORS:
        return StorageError(
            f"corpus can't be written to {place}: {e.strerror}; free space there or choose another disk"
        )
    return DataError(
        f"corpus can't be written to {place}: {e.strerror}; choose another folder (--out, or OUTLAST_CACHE for the "
        "default corpus)"
    )


def _hidden(place: Path) -> Path:
    return place.with_name(f".{place.name}.unfinished-{os.getpid()}-{secrets.token_hex(4)}")


def _locked_folder(place: Path) -> tuple[Path, int]:
    while True:
        folder = _hidden(place)
        folder.mkdir()
        # Another process may sweep it away until it is locked: then make another.
        try:
            fd = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _lock(fd) is not False and folder.exists():
            return folder, fd
        os.close(fd)


def _lock(fd: int) -> bool | None:
    """True: got it; False: another has it; None: this file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sweep(place: Path) -> None:
    for folder in place.parent.glob(f".{glob.escape(place.name)}.unfinished-*"):
        try:
            fd = os.open(folder, os.O_RDONLY)
        except OSError:
            continue
        if _lock(fd):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)


# --- Reading ---------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest:
    """Read and check a store's manifest.

    Raises:
        DataError: no store there, or one that this version can't read, or that was altered.
    """
    file = path / MANIFEST
    if not path.is_dir():
        found = "it isn't a folder" if path.exists() else "no such folder"
        raise DataError(f"corpus {path}: {found}; make it with `outlast prepare --out {path} SOURCES`")
    try:
        raw = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise DataError(f"corpus {path}: it has no {MANIFEST}, so it isn't a corpus; {_again(path)}") from None
    except OSError as e:
        raise DataError(f"corpus {path}: {MANIFEST} can't be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        why = " ".join(str(e).split())
        raise DataError(f"corpus {path}: {MANIFEST} isn't valid JSON ({why}); {_again(path)}") from None
    manifest = _manifest(path, raw)
    if manifest.hash != manifest.content_hash():
        raise DataError(f"corpus {path}: {MANIFEST} was altered: its hash doesn't fit its content; {_again(path)}")
    if not manifest.num_tokens:
        raise DataError(f"corpus {path}: it is empty (0 tokens); {_again(path)}")
    return manifest


def open_tokens(path: Path, manifest: Manifest, most_blocks: int = CHECKED_BLOCKS) -> np.ndarray:
    """Map `tokens.bin`, after its size and up to `most_blocks` blocks were compared with the manifest.

    Returns:
        Ids, `[num_tokens]`, read-only.

    Raises:
        DataError: it is missing, truncated or altered.
    """
    file = path / TOKENS
    expected = manifest.num_tokens * np.dtype(manifest.dtype).itemsize
    try:
        found = file.stat().st_size
        if found != expected:
            raise DataError(f"corpus {path}: {TOKENS} has {found:,} bytes, expected {expected:,}; {_again(path)}")
        with file.open("rb") as f:
            for index in _spread(len(manifest.blocks), most_blocks):
                first = index * manifest.block_bytes
                end = min(first + manifest.block_bytes, expected)
                f.seek(first)
                if _hash_of(f, end - first) != manifest.blocks[index]:
                    raise DataError(
                        f"corpus {path}: {TOKENS} was altered: bytes {first:,} to {end - 1:,} don't have the hash in "
                        f"{MANIFEST}; {_again(path)}"
                    )
        # Read, not mapped, above: a failing disk is then an error, where a mapping's is a signal that kills.
        return np.memmap(file, _stored(manifest.dtype), "r", shape=(manifest.num_tokens,))
    except OSError as e:
        raise DataError(f"corpus {path}: {TOKENS} can't be read: {e.strerror}; {_again(path)}") from None


def _manifest(path: Path, raw: Any) -> Manifest:
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version is not None and version != VERSION:
        raise DataError(
            f"corpus {path}: format version {version!r}, this outlast reads version {VERSION}; update outlast or "
            f"{_again(path)}"
        )
    fields = dataclasses.fields(Manifest)
    missing = [f.name for f in fields if not isinstance(raw, dict) or f.name not in raw]
    if missing:
        raise DataError(f"corpus {path}: {MANIFEST} lacks {', '.join(missing)}; {_again(path)}")
    kinds = {name: get_origin(kind) or kind for name, kind in get_type_hints(Manifest).items()}
    wrong = [name for name, kind in kinds.items() if not isinstance(raw[name], kind)]
    if wrong:
        raise DataError(f"corpus {path}: {MANIFEST} has values of a wrong type for {', '.join(wrong)}; {_again(path)}")
    return Manifest(**{f.name: raw[f.name] for f in fields})


def _again(path: Path) -> str:
    return f"remove {path} and make it again with `outlast prepare --out {path} SOURCES`"


def _spread(count: int, most: int) -> list[int]:
    """Up to `most` of `range(count)`, evenly, the ends among them."""
    if count <= most:
        return list(range(count))
    return sorted({i * (count - 1) // (most - 1) for i in range(most)})


def _hash_of(f: BinaryIO, num_bytes: int) -> str:
    seen = xxhash.xxh3_128()
    while num_bytes and (data := f.read(min(num_bytes, _READ_BYTES))):
        seen.update(data)
        num_bytes -= len(data)
    return seen.hexdigest()
