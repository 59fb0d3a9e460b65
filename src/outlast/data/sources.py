"""Where text comes from: files, folders, JSON lines, the Python standard library.

Text is streamed in pieces, so memory doesn't grow with the sources.
"""

import codecs
import json
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from outlast.errors import DataError

PIECE_CHARS = 1 << 20
"""A longer document is tokenized in pieces of about this size, cut after a line's end."""

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Sources:
    """Documents of text files (`*.jsonl`: JSON lines) and folders, in an order that only names decide.

    A folder is read recursively in sorted order, without names that begin with a dot; files that aren't
    UTF-8 text are passed over and counted. A file that is named itself must be text.

    Args:
        paths: files and folders. Empty: the source of the Python standard library of this machine.
        exclude: a folder that isn't read (the output may lie inside a source).

    Attributes:
        names: the sources, for the manifest.
        num_skipped: files passed over so far.
        done_bytes: bytes of files read so far.

    Raises:
        DataError: a source doesn't exist.
    """

    def __init__(self, paths: Sequence[str | Path], exclude: Path | None = None) -> None:
        self._paths = [Path(p).expanduser().absolute() for p in paths]
        self._exclude = exclude
        self.names = [str(p) for p in self._paths] or [library_name()]
        self.num_skipped = 0
        self.done_bytes = 0
        for path in self._paths:
            if not (path.is_file() or path.is_dir()):
                raise DataError(f"source {path}: no such file or folder; give text files, folders or .jsonl files")

    def total_bytes(self) -> int:
        """Bytes of all files, text or not."""
        return sum(file.stat().st_size for file, _ in self._files())

    def pieces(self) -> Iterator[str | None]:
        """Pieces of text in order; None ends a document. A document without text isn't one.

        Raises:
            DataError: a file that can't be read, a named file that isn't text, a JSON line without text.
        """
        for file, named in self._files():
            try:
                if file.suffix == ".jsonl":
                    yield from self._json_lines(file)
                elif _is_text(file):
                    yield from self._text(file)
                elif named:
                    raise DataError(f"source {file}: not UTF-8 text; convert it or leave it out")
                else:
                    self.num_skipped += 1
                    self.done_bytes += file.stat().st_size
            except OSError as e:
                raise DataError(f"source {file}: {e.strerror}; make it readable or leave it out") from None

    def _files(self) -> Iterator[tuple[Path, bool]]:
        """Each file, and whether it was named itself."""
        if not self._paths:
            yield from ((file, False) for file in library_files())
        for path in self._paths:
            if path.is_file():
                yield path, True
            else:
                yield from ((file, False) for file in walk(path, self._keeps))

    def _keeps(self, path: Path) -> bool:
        return not path.name.startswith(".") and path.name != "__pycache__" and path != self._exclude

    def _text(self, file: Path) -> Iterator[str | None]:
        with file.open(encoding="utf-8", newline="") as f:
            empty = True
            try:
                while text := f.read(PIECE_CHARS):
                    text += f.readline(PIECE_CHARS)
                    empty = False
                    yield text
                    self.done_bytes += len(text.encode())
            except UnicodeDecodeError:
                raise DataError(f"source {file}: it was changed while it was read; prepare again") from None
        if not empty:
            yield None

    def _json_lines(self, file: Path) -> Iterator[str | None]:
        with file.open("rb") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    text = _text_of_line(line, f"source {file}, line {number}")
                    if text:
                        yield text
                        yield None
                self.done_bytes += len(line)


def walk(folder: Path, keeps: Callable[[Path], bool]) -> Iterator[Path]:
    """Regular files under a folder, each folder's own first, in sorted order.

    Args:
        folder: where to start.
        keeps: whether a file or folder is wanted.

    Raises:
        DataError: a folder can't be read.
    """
    try:
        entries = sorted(filter(keeps, folder.iterdir()))
        files = [entry for entry in entries if entry.is_file()]
        folders = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]  # a link may lead back up
    except OSError as e:
        raise DataError(f"source {folder}: {e.strerror}; make it readable or leave it out") from None
    yield from files
    for inner in folders:
        yield from walk(inner, keeps)


def library_files() -> Iterator[Path]:
    """The Python standard library's source, without tests and installed packages, in sorted order."""
    return walk(Path(sysconfig.get_paths()["stdlib"]), _is_library)


def library_name() -> str:
    """The standard library, for people."""
    return f"the standard library's source of {platform.python_implementation()} {platform.python_version()}"


def library_key() -> str:
    """What decides the standard library's content on this machine: version, and each file's name, size and time.

    Raises:
        DataError: this Python has no source files.
    """
    root = sysconfig.get_paths()["stdlib"]
    seen = xxhash.xxh3_64()
    count = 0
    for file in library_files():
        stat = file.stat()
        seen.update(f"{file.relative_to(root).as_posix()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        count += 1
    if not count:
        raise DataError(f"no Python source under {root}: name a corpus in data.path (`outlast prepare` makes one)")
    return f"{platform.python_implementation().lower()}-{platform.python_version()}-{seen.hexdigest()}"


def _is_library(path: Path) -> bool:
    if path.suffix == ".py":
        # Says where Python was built: it would make a corpus of each machine's own.
        return not path.name.startswith("_sysconfigdata_")
    return "." not in path.name and path.name not in _NOT_LIBRARY


def _is_text(file: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with file.open("rb") as f:
            while block := f.read(PIECE_CHARS):
                if "\0" in decoder.decode(block):
                    return False
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _text_of_line(line: bytes, where: str) -> str:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where}: not JSON ({' '.join(str(e).split())}); each line must be an object") from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        found = (
            f"an object with {', '.join(sorted(value)[:8]) or 'no fields'}" if isinstance(value, dict) else "no object"
        )
        raise DataError(f'{where}: found {found}; expected a "text" field that holds a string')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: its text holds half of a surrogate pair, which isn't Unicode; repair it") from None
    return text
