"""Files that are complete or absent, and the files that a glob matches."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from daskgpt.config.errors import refusal, require

T = TypeVar("T")


def check_writable(path: str | os.PathLike[str], where: str, name: str) -> None:
    """Check that a file can be written, before anything is computed.

    where, name   of the error and of the setting

    Errors   ValueError if the path is a folder, its folder is missing, or the system forbids writing
    """
    target = Path(path).absolute()
    place = target if target.exists() else target.parent
    fine = target.parent.is_dir() and not target.is_dir() and os.access(place, os.W_OK)
    rule, advice = f"{name} must name a file that can be written", f"Make {target.parent} first, or name another file."
    require(fine, where, rule, {name: path}, advice)


@contextmanager
def replacing(path: str | os.PathLike[str], where: str) -> Iterator[BinaryIO]:
    """Yield a file under a temporary name in the same folder; it gets the final name when all of it is on the disk.

    where    opens error messages

    Errors   ValueError if path is a folder, FileNotFoundError if its folder is missing, OSError if the system refuses
             (no room, no permission), with the path and the reason
    """
    require(not Path(path).is_dir(), where, "path must name a file", {"path": path}, "It is a folder: add a file name.")
    with _temporary(path, where) as temporary:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


@contextmanager
def appearing(path: str | os.PathLike[str], where: str) -> Iterator[Path]:
    """Yield a folder under a temporary name; it gets the final name when its content is on the disk.

    where    opens error messages

    Errors   ValueError if the path exists already, FileNotFoundError if its parent is missing, OSError if the system
             refuses, with the path and the reason
    """
    target = Path(path)
    free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    require(free, where, "the folder must be new, or empty", {"path": path}, "Nothing is overwritten: name another.")
    with _temporary(path, where) as temporary:
        temporary.mkdir()
        yield temporary
        sync_folder(temporary)
        os.rename(temporary, target)
        sync_folder(target.parent)


@contextmanager
def _temporary(path: str | os.PathLike[str], where: str) -> Iterator[Path]:
    """Yield a temporary name in the folder of a path; what has it is removed after an error."""
    target = Path(path)
    rule, advice = "the folder must exist", f"Make {target.parent} first."
    require(target.parent.is_dir(), where, rule, {"path": path}, advice, FileNotFoundError)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with written(path, where):
            yield temporary
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def written(path: str | os.PathLike[str], where: str) -> Iterator[None]:
    """Raise the system's errors of writing in the common form, with the path, which they lack when a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it has this form already
            raise
        got, advice = f"path={path} ({error.strerror or error})", "Free space there, or name another place."
        raise refusal(type(error), where, "all of the file must be written", got, advice) from error


def write_hashed(file: BinaryIO, parts: Iterable[memoryview]) -> str:
    """Write parts of a file one after another; return the SHA-256 of all of them, in hexadecimal.

    Making and hashing a part takes as long as writing one, so another thread makes the next part meanwhile. Each part
    is flushed to the disk at once; otherwise flushing would begin when all are written.
    """
    digest, left, position = hashlib.sha256(), iter(parts), file.tell()

    def following() -> memoryview | None:
        part = next(left, None)
        if part is not None:
            digest.update(part)
        return part

    with ThreadPoolExecutor(1) as maker:
        ahead = maker.submit(following)
        while (part := ahead.result()) is not None:
            ahead = maker.submit(following)
            file.write(part)
            file.flush()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), position, part.nbytes, os.POSIX_FADV_DONTNEED)
            position += part.nbytes
    return digest.hexdigest()


def digest_of(known: Any) -> str:
    """Return the SHA-256 of a value as JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(known, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def open_no_link(path: Path, mode: str) -> BinaryIO:
    """Open a file, unbuffered, unless its name is a symbolic link, which could point to any file of the user.

    Errors   ValueError for a link
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    try:
        return cast(BinaryIO, open(path, mode, 0, opener=opener))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        rule = "a file that is written must not be a symbolic link"
        raise refusal(ValueError, "files", rule, {"path": path}, "Remove the link.") from None


def locked(path: Path, where: str, rule: str) -> BinaryIO:
    """Lock a file, which is made if it is missing, until it is closed or this process ends; return it.

    It holds the number of this process. On a file system without locks nothing is locked.

    where, rule   of the error

    Errors   RuntimeError if another process has locked it, ValueError for a symbolic link
    """
    file = open_no_link(path, "a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(20).decode(errors="replace").strip()
        file.close()
        got = {"folder": path.parent, "process": holder or "unknown"}
        raise refusal(RuntimeError, where, rule, got, "Wait for its end, or stop it.") from None
    except OSError:
        return file  # the file system has no locks
    with suppress(OSError):  # the number only serves the message above
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
    return file


def set_aside(path: Path, what: str) -> None:
    """Rename a file whose name is needed, for example to `metrics.jsonl.damaged-1`; it is never deleted."""
    number = 0
    while path.exists():
        number += 1
        aside = path.with_name(f"{path.name}.{what}-{number}")
        if not aside.exists():
            os.rename(path, aside)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Flush the names in a folder to the disk, so that renamed and removed files survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def readable(path: str | os.PathLike[str], where: str) -> Iterator[None]:
    """Raise the system's errors in the common form."""
    try:
        yield
    except OSError as error:
        got = f"file={path} ({error.strerror or error})"
        advice = "Check its permissions and its disk; workers of a cluster must find it under the same path."
        raise refusal(type(error), where, "the file must be readable", got, advice) from error


def json_lines(path: Path, where: str, parse: Callable[[Any], T], rule: str, advice: str) -> Iterator[T]:
    """Yield what `parse` makes of the JSON of each line of a file that is not blank.

    where, rule, advice   of the error

    Errors   FileNotFoundError, OSError; ValueError naming the first line that is no JSON, or that `parse` refuses by a
             ValueError, TypeError or KeyError
    """
    with readable(path, where):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found = parse(json.loads(line.decode()))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                got = {"path": path, "line": number, "found": f"{type(error).__name__}: {str(error)[:60]}"}
                raise refusal(ValueError, where, rule, got, advice) from None
            yield found


def matching_files(source: str, where: str) -> list[Path]:
    """Return the file itself, or every file that the glob matches, sorted.

    Errors   FileNotFoundError if there is no such file or the glob matches none; `where` opens the message
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    require(not path.is_dir(), where, "the source must name a file", {"source": source}, "Give a file or a glob.")
    if not glob.has_magic(source):
        raise refusal(FileNotFoundError, where, "the file must exist", {"source": source}, "Check the path.")
    found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
    rule, advice = "the glob must match at least one file", "Check the path; ** spans folders."
    require(bool(found), where, rule, {"source": source}, advice, FileNotFoundError)
    return found
