# SPDX-License-Identifier: Apache-2.0
"""Reading and writing files so that nothing half-written is ever seen under its final name."""

import codecs
import errno
import glob
import hashlib
import io
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pilotfish.errors import UserError

LONGEST_LINE = 1 << 25  # bytes of a JSON line: an answer of a million tokens, ids and text, takes less than 20 MB
CHECK = "crc32"  # the key of a journal line's checksum
DEEPEST = 100  # lists and objects inside one another, on a JSON line
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # ends of names, as pyarrow calls what they mean
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success fsync it and rename it to `path`.

    Raises UserError where the disk is full or the folder cannot be written; nothing is seen under `path` then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        _clear_up(path)
    except OSError as error:
        raise unwritable(path, error) from None
    except Exception as error:
        # safetensors says what the system told it in words alone.
        if told := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(told[1])
            raise unwritable(path, OSError(number, os.strerror(number))) from error
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _clear_up(path: Path) -> None:
    """Remove what a process that was killed left of its own try to write `path`."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        writer = left.name.removesuffix(".tmp").rpartition(".")[2]
        try:
            os.kill(int(writer), 0)
        except ProcessLookupError:
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
        except (ValueError, PermissionError):
            continue


def unwritable(path: Path, error: OSError) -> Exception:
    """A UserError with the cure for faults of the disk or of rights; any other error as it is."""
    if error.errno in FULL:
        cure = "free some space"
    elif error.errno in FORBIDDEN:
        cure = "give yourself the right to write there, or choose another folder"
    else:
        return error
    return UserError(f"{path}: cannot be written ({error.strerror}); {cure} and run again: what is finished is kept")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write sorted, indented JSON atomically; equal values give equal bytes."""
    write_text(path, json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict:
    """Read a file that holds one JSON object; a missing or broken one is a UserError that names it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); delete it and run again to make it anew") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: a JSON {type(value).__name__}, not an object; delete it and run again")
    return value


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """Write one JSON object a line, atomically, keys sorted."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def _unique(pairs: list[tuple[str, Any]]) -> dict:
    """An object of JSON, none of whose keys is repeated."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in made if keys.count(key) > 1)
        raise ValueError(f"the key {repeated[:100]!r} is repeated")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:100]} is not a finite number")
    return number


_ANY = json.JSONDecoder(object_pairs_hook=_unique)
_FINITE = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)


def _is_deep(value: object) -> bool:
    """Whether lists and objects lie more than DEEPEST inside one another."""
    level = [value]
    for _ in range(DEEPEST):
        held = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for values in held for inner in values if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _row(line: bytes, decoder: json.JSONDecoder) -> dict:
    """The JSON object of one line; a ValueError says what is wrong with it and the cure."""
    if line.startswith(codecs.BOM_UTF8):
        raise ValueError("starts with a byte order mark; re-save the file as UTF-8 without one (BOM)")
    try:
        row = decoder.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error}); re-save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        cut = "" if line.endswith(b"\n") else "the file ends inside it, so copy the whole file again, or "
        raise ValueError(
            f"not valid JSON ({error}); {cut}mend or remove the line, each line must be one whole JSON object"
        ) from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON {type(row).__name__}, not an object in braces; mend or remove the line")
    shallow, whole = line.count(b"{") + line.count(b"[") <= DEEPEST, b"\\ud" not in line.lower()
    if not (shallow and whole) and (fault := row_fault(row)):
        raise ValueError(fault)
    return row


def row_fault(row: dict) -> str | None:
    """What is wrong with a row that is JSON all the same, and the cure."""
    if _is_deep(row):
        return f"lists or objects more than {DEEPEST} deep; mend or remove the line"
    if not is_text(json.dumps(row, ensure_ascii=False)):
        return "half of a surrogate pair (\\ud...), which is no text; mend or remove the line"
    return None


def is_text(value: str) -> bool:
    """Whether a text can be written as UTF-8: escapes of JSON and YAML may spell half a surrogate pair."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def iterate_jsonl(path: Path, finite: bool = False) -> Iterator[dict]:
    """Yield one JSON object a line, holding one at a time; lines end with LF or CRLF.

    A broken line, or one of more than LONGEST_LINE bytes, is a UserError with its number (from 1) and the cure,
    raised when it is reached. NaN and infinity, which JSON lacks, are numbers unless all must be `finite`.
    """
    decoder = _FINITE if finite else _ANY
    with reading(path) as handle:
        for number, line in enumerate(iter(lambda: handle.readline(LONGEST_LINE + 1), b""), 1):
            try:
                if len(line) > LONGEST_LINE:
                    raise ValueError(
                        f"longer than {LONGEST_LINE:,} bytes; shorten or remove the line, or, if the file is one "
                        "large list, name it .json, or write one JSON object a line"
                    )
                row = _row(line, decoder)
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {error}") from None
            yield row


def plain_suffix(path: Path) -> str:
    """The end of a file's name, without that of its compression."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


@contextmanager
def reading(path: Path) -> Iterator[io.BufferedReader]:
    """A file's bytes, unpacked where its name ends in one of COMPRESSED; UserError where they cannot be read."""
    try:
        if path.suffix not in COMPRESSED:
            with open(path, "rb") as handle:
                yield handle
            return
        import pyarrow

        with open(path, "rb") as packed, pyarrow.input_stream(packed, COMPRESSED[path.suffix]) as unpacked:
            yield io.BufferedReader(unpacked)
    except OSError as error:
        cure = "check the path in the configuration" if error.strerror else "copy the whole file again"
        raise UserError(f"{path}: {error.strerror or error}; {cure}") from None


def read_jsonl(path: Path) -> list[dict]:
    """All rows of `iterate_jsonl`, for files that are small or needed whole."""
    return list(iterate_jsonl(path))


def append_jsonl(path: Path, value: dict) -> None:
    """Add one JSON line to a journal and see it to the disk; NaN and infinity are written as such."""
    try:
        with open(path, "ab") as handle:
            handle.write(json.dumps(value, sort_keys=True).encode("ascii") + b"\n")
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise unwritable(path, error) from None


def read_appended(path: Path) -> list[dict]:
    """Whole lines of a journal; a torn last one, from a job that was killed while writing, is cut off.

    A line that is not one JSON object is left out: what it stood for is done again.
    """
    try:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; mend its rights, or delete it and run again") from None
    rows = []
    for line in whole.split(b"\n"):
        with suppress(ValueError):
            rows.append(_row(line + b"\n", _ANY))
    return rows


def append_checked(path: Path, value: dict) -> None:
    """As `append_jsonl`, with a checksum of the line: nothing else vouches for unfinished work."""
    append_jsonl(path, {**value, CHECK: _crc(value)})


def read_checked(path: Path) -> list[dict]:
    """Lines of `append_checked` that are whole; one in which any byte has changed is left out, and done again."""
    return [row for row in read_appended(path) if row.pop(CHECK, None) == _crc(row)]


def _crc(value: dict) -> int:
    # A value and what JSON makes of it must give the same: keys that are no strings become some.
    return zlib.crc32(json.dumps(json.loads(json.dumps(value)), sort_keys=True).encode("ascii"))


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def publish_folder(source: Path, final: Path) -> None:
    """Make `final` hold the files of `source`, by links and one rename; `source` stays as it is.

    A job that is killed right afterwards still finds its unfinished work complete.
    """
    staged = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        link(file, staged / file.name)
    if final.exists():
        shutil.rmtree(final)
    os.replace(staged, final)
    _clear_up(final)


def link(source: Path, destination: Path) -> None:
    """Give a file a second name without copying it; copy where the file system cannot link."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    destination.unlink(missing_ok=True)
    try:
        os.link(source, destination)
    except OSError:
        with replacing(destination) as temporary:
            shutil.copyfile(source, temporary)
