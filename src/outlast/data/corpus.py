"""The corpus: text made into a memory-mapped token store once, and opened by every process that trains."""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from outlast.config import Data
from outlast.data import store
from outlast.data.sources import PIECE_CHARS, Sources, library_key, library_name
from outlast.data.store import Manifest
from outlast.data.vocabulary import Bytes, HuggingFace, Vocabulary, read_tokenizer
from outlast.errors import ConfigError, DataError

_SAY_EVERY_S = 5.0


class Corpus:
    """A token store, checked and open for reading.

    Args:
        path: folder that `prepare` made.

    Attributes:
        path: the folder.
        manifest: what it holds.
        tokens: all ids, memory-mapped, `[num_tokens]` uint16 or uint32, read-only.

    Raises:
        DataError: missing, altered, truncated, empty, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = store.read_manifest(path)
        self.tokens = store.open_tokens(path, self.manifest)
        if self.manifest.tokenizer_sha256 != Bytes.sha256:
            self._check_tokenizer()

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return self.manifest.vocab_size

    @property
    def hash(self) -> str:
        """Of the ids and their meaning, hex; the same for the same text wherever it was prepared."""
        return self.manifest.hash

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of the vocabulary, hex; for a Hugging Face one of its file."""
        return self.manifest.tokenizer_sha256

    @property
    def num_tokens(self) -> int:
        """Ids in the store, end-of-text ids included."""
        return self.manifest.num_tokens

    def encode(self, text: str) -> list[int]:
        """Ids of a text; no end-of-text id is added."""
        return self._vocabulary.encode([text])[0].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids. End-of-text, other special ids and those outside the vocabulary give nothing."""
        return self._vocabulary.decode(ids)

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        if self.tokenizer_hash == Bytes.sha256:
            return Bytes()
        file = self.path / store.TOKENIZER
        return HuggingFace(read_tokenizer(file), file)

    def _check_tokenizer(self) -> None:
        found = hashlib.sha256(read_tokenizer(self.path / store.TOKENIZER)).hexdigest()
        if found != self.tokenizer_hash:
            raise DataError(
                f"corpus {self.path}: {store.TOKENIZER} was altered: sha256 {found[:12]}, expected "
                f"{self.tokenizer_hash[:12]}; put the file back or prepare the corpus again"
            )


def open_corpus(data: Data) -> Corpus:
    """Open the corpus that a config names, or else the default one.

    Raises:
        DataError: it can't be used, or wasn't made with `data.tokenizer`.
        StorageError: the default corpus couldn't be written to its cache.
    """
    corpus = Corpus(Path(data.path).expanduser().absolute()) if data.path else default_corpus()
    if data.tokenizer:
        file = Path(data.tokenizer).expanduser()
        found = hashlib.sha256(read_tokenizer(file)).hexdigest()
        if found != corpus.tokenizer_hash:
            raise DataError(
                f"corpus {corpus.path}: made with tokenizer {corpus.manifest.tokenizer} (sha256 "
                f"{corpus.tokenizer_hash[:12]}), but data.tokenizer is {file} (sha256 {found[:12]}); prepare a corpus "
                "with --tokenizer, or leave data.tokenizer out"
            )
    return corpus


def default_corpus(cache: Path | None = None) -> Corpus:
    """The source of this machine's Python standard library as bytes, prepared on first use.

    Args:
        cache: folder of caches. Default: `$OUTLAST_CACHE`, `$XDG_CACHE_HOME/outlast` or `~/.cache/outlast`.

    Raises:
        DataError: there is no such source, or the cache can't be written.
        StorageError: the disk is full or failing.
    """
    place = (cache or _cache_folder()).absolute() / f"stdlib-bytes{store.VERSION}-{library_key()}"
    tries = 3
    while True:
        inode = store.inode(place)
        if inode is None:
            _say(f"preparing {library_name()} in {place}, once")
            prepare([], place)
        try:
            return Corpus(place)
        except DataError as e:
            tries -= 1
            if not tries:
                raise
            _say(f"{str(e).split('; ')[0]}: making it again, as it is a cache")
            store.discard(place, inode)


def _cache_folder() -> Path:
    if folder := os.environ.get("OUTLAST_CACHE"):
        return Path(folder).expanduser()
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "outlast"
    try:
        return Path.home() / ".cache" / "outlast"
    except RuntimeError:
        raise DataError("no home folder to keep the default corpus in: set OUTLAST_CACHE, or data.path") from None


# --- Preparing -------------------------------------------------------------------------------------


def prepare(sources: Sequence[str | Path], out: str | Path, tokenizer: str | Path | None = None) -> Manifest:
    """Make text into a token store: each document's ids, then the end-of-text id where the vocabulary has one.

    The store appears at `out` whole or not at all. A store that is there already is kept if it is the
    same, and never replaced; processes that prepare the same one at once all succeed.

    Args:
        sources: see `Sources`; empty: the Python standard library's source.
        out: folder to make; must be absent, empty, or hold the same corpus.
        tokenizer: a Hugging Face tokenizers JSON. None: bytes.

    Raises:
        DataError: sources, tokenizer or `out` can't be used.
        StorageError: the disk is full or failing.
    """
    out = Path(out).expanduser().resolve()
    content, vocabulary = None, Bytes()
    if tokenizer is not None:
        content = read_tokenizer(Path(tokenizer).expanduser())
        vocabulary = HuggingFace(content, Path(tokenizer))
    reader = Sources(sources, exclude=out)
    try:
        _check_place(out, reader.names, vocabulary)
        with store.new_folder(out) as folder:
            manifest = _write(folder, reader, vocabulary)
            if content is not None:
                (folder / store.TOKENIZER).write_bytes(content)
            store.write_manifest(folder, manifest)
            if not store.install(folder, out) and Corpus(out).hash != manifest.hash:
                raise DataError(f"corpus {out}: another corpus is there already; remove it or choose another folder")
    except OSError as e:
        raise store.write_error(out, e) from None
    return manifest


def _check_place(out: Path, names: list[str], vocabulary: Vocabulary) -> None:
    """Refuse a place that can't become this corpus, before the work is done."""
    if out.is_dir() and any(out.iterdir()):
        if not (out / store.MANIFEST).exists():
            raise DataError(f"{out} isn't empty and isn't a corpus; it won't be overwritten: choose another folder")
        found = Corpus(out).manifest
        if (found.sources, found.tokenizer_sha256) != (names, vocabulary.sha256):
            raise DataError(
                f"corpus {out}: another corpus is there already, of {', '.join(found.sources)} with tokenizer "
                f"{found.tokenizer}; remove it or choose another folder"
            )
    elif out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; choose a folder for the corpus")
    elif os.path.ismount(out):
        raise DataError(f"{out} is where a disk is mounted and can't be renamed to: choose a folder inside it")


def _write(folder: Path, reader: Sources, vocabulary: Vocabulary) -> Manifest:
    num_documents = num_bytes = 0
    dtype = store.dtype_for(vocabulary.vocab_size)
    end = [] if vocabulary.end_of_text is None else [vocabulary.end_of_text]
    with store.TokenWriter(folder, dtype) as writer, _progress(reader) as show:
        for batch in _batches(reader.pieces()):
            ids = iter(vocabulary.encode([piece for piece in batch if piece is not None]))
            writer.write(np.concatenate([np.array(end, np.uint32) if piece is None else next(ids) for piece in batch]))
            num_documents += batch.count(None)
            num_bytes += sum(len(piece.encode()) for piece in batch if piece is not None)
            show(writer.num_tokens)
        blocks = writer.finish()
    if not num_bytes:
        raise DataError(
            f"no text in {', '.join(reader.names)} ({reader.num_skipped} files aren't UTF-8 text): nothing to make a "
            "corpus of; give other sources"
        )
    manifest = Manifest(
        format_version=store.VERSION,
        sources=reader.names,
        tokenizer=vocabulary.name,
        tokenizer_sha256=vocabulary.sha256,
        vocab_size=vocabulary.vocab_size,
        end_of_text=-1 if vocabulary.end_of_text is None else vocabulary.end_of_text,
        dtype=dtype,
        num_tokens=writer.num_tokens,
        num_documents=num_documents,
        num_bytes=num_bytes,
        num_skipped=reader.num_skipped,
        block_bytes=writer.block_bytes,
        blocks=blocks,
        hash="",
    )
    return dataclasses.replace(manifest, hash=manifest.content_hash())


def _batches(pieces: Iterable[str | None]) -> Iterator[list[str | None]]:
    """Lists of pieces of `PIECE_CHARS` or a little more together, for vocabularies that use all cores."""
    batch: list[str | None] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece or "") + 1
        if chars >= PIECE_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _progress(reader: Sources) -> Iterator[Callable[[int], None]]:
    """Shows how far a reader is, on stderr: a bar on a terminal, otherwise a line every few seconds."""
    total = reader.total_bytes()
    if not sys.stderr.isatty():
        last = time.monotonic()

        def say(num_tokens: int) -> None:
            nonlocal last
            if time.monotonic() >= last + _SAY_EVERY_S:
                last = time.monotonic()
                _say(f"read {reader.done_bytes / 1e6:,.0f} of {total / 1e6:,.0f} MB, {num_tokens:,} tokens")

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), DownloadColumn(), TextColumn("{task.fields[tokens]:,} tokens"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, tokens=0)
        yield lambda num_tokens: bar.update(task, completed=reader.done_bytes, tokens=num_tokens)


def _say(line: str) -> None:
    print(f"outlast: {line}", file=sys.stderr, flush=True)


# --- Command ---------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def prepare_command(args: Sequence[str]) -> int:
    """`outlast prepare --out DIR [SOURCES…] [--tokenizer FILE]`; returns the exit code.

    Raises:
        UserError: see `prepare`; `ConfigError` for wrong arguments.
    """
    parser = _Parser(
        prog="outlast prepare",
        description="Make text into a corpus for `outlast train --data.path=DIR`. It appears whole or not at all.",
    )
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCES",
        help='text files, folders of them, .jsonl files with a "text" field a line; none: the source of the Python '
        "standard library on this machine",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make; nothing there is overwritten")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a Hugging Face tokenizers JSON, copied into DIR; default: bytes, with a vocabulary of 257",
    )
    given = parser.parse_args(args)
    m = prepare(given.sources, given.out, given.tokenizer)
    skipped = f"; {m.num_skipped:,} files passed over: not UTF-8 text" if m.num_skipped else ""
    print(
        f"{m.num_tokens:,} tokens, {m.num_documents:,} documents, {m.num_bytes:,} bytes, tokenizer {m.tokenizer} "
        f"(vocabulary {m.vocab_size:,}) in {given.out}{skipped}"
    )
    return 0
