"""Files that are complete or absent, and the files that a glob matches."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from daskgpt.config.errors import refusal, refusing, require

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors by which file systems of networks, drives and user programs refuse a call that they do not support.
LACKING = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.ENOTTY, errno.EBADF, errno.EISDIR)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
ADVICE = {
    (errno.EFBIG,): "Raise the limit on the size of files (of its file system, or ulimit -f), or name another place.",
    NO_ROOM: "Free space there, or name another place.",
    FORBIDDEN: "Its permissions or its mount forbid that: change them, or name another place.",
    (errno.ENAMETOOLONG,): "Give it a shorter name.",
    (errno.EMFILE, errno.ENFILE): "Raise the limit of open files (ulimit -n).",
    LACKING: "Its file system lacks what that needs: name a place on another one.",
}


def check_writable(path: str | os.PathLike[str], where: str, name: str) -> None:
    """Check that a file can be written, before anything is computed.

    where, name   of the error and of the setting

    Errors   ValueError if the path is a folder, its folder is missing, or the system forbids writing
    """
    target = Path(path).absolute()
    place = target if target.exists() else target.parent
    advice = f"Make {target.parent} first, or name another file."
    if place.exists():
        advice = "It is a folder: add a file name." if target.is_dir() else ADVICE[FORBIDDEN]
    fine = target.parent.is_dir() and not target.is_dir() and os.access(place, os.W_OK)
    require(fine, where, f"{name} must name a file that can be written", {name: path}, advice)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path that may begin with ~ or ~name, the folder of a user. Errors   ValueError if there is none"""
    rule, advice = "the folder of the user must be known", "Write the whole path."
    with refusing(RuntimeError, "files", rule, {"path": path}, advice):
        whole = Path(path).expanduser()
    return whole


def printable(path: str) -> str:
    """Return a path with escapes for bytes that are not UTF-8, which Python has read as lone surrogates."""
    return path.encode(errors="backslashreplace").decode()


@contextmanager
def replacing(path: str | os.PathLike[str], where: str) -> Iterator[BinaryIO]:
    """Yield a file under a temporary name in the same folder; it gets the final name when all of it is on the disk.

    where    opens error messages

    Errors   ValueError if path is a folder, FileNotFoundError if its folder is missing, OSError if the system refuses
             (no room, no permission), with the path and the reason
    """
    require(not Path(path).is_dir(), where, "path must name a file", {"path": path}, "It is a folder: add a file name.")
    with temporary_beside(path, where) as temporary:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            sync(file.fileno())
        os.replace(temporary, Path(path))


def write_file(path: str | os.PathLike[str], content: bytes, where: str) -> None:
    """Write a file that is complete or absent. Errors   as of `replacing`"""
    with replacing(path, where) as file:
        file.write(content)


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
    with temporary_beside(path, where) as temporary:
        temporary.mkdir()
        yield temporary
        sync_folder(temporary)
        if target.is_dir():
            target.rmdir()  # not every file system renames over an empty folder
        os.replace(temporary, target)
        sync_folder(target.parent)


@contextmanager
def temporary_beside(path: str | os.PathLike[str], where: str) -> Iterator[Path]:
    """Yield a temporary name in the folder of a path; after an error, a file or folder of that name is removed."""
    target = Path(path)
    rule, folder = "the folder must exist", target.parent
    require(folder.is_dir(), where, rule, {"folder": folder}, "Make it first.", FileNotFoundError)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with written(path, where):
            yield temporary
    except BaseException:
        remove(temporary)
        raise


@contextmanager
def written(path: str | os.PathLike[str], where: str) -> Iterator[None]:
    """Raise the system's errors of writing in the common form, with the path, which is missing if a disk is full."""
    try:
        yield
    except OSError as error:
        if hasattr(error, "is_refusal"):
            raise
        rule, got = "all of the file must be written", f"path={path} ({error.strerror or error})"
        fitting = (advice for numbers, advice in ADVICE.items() if error.errno in numbers)
        advice = next(fitting, "Check the disk, or name another place.")
        raise refusal(type(error), where, rule, got, advice) from error


def write_hashed(file: BinaryIO, parts: Iterable[memoryview]) -> str:
    """Write parts of a file one after another; return the SHA-256 of all of them, in hexadecimal.

    Making and hashing a part takes as long as writing it, so another thread makes the next part meanwhile. Each part is
    flushed to the disk at once; otherwise flushing would begin only after the last part.
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
                with suppress(OSError):  # it only serves speed
                    os.posix_fadvise(file.fileno(), position, part.nbytes, os.POSIX_FADV_DONTNEED)
            position += part.nbytes
    return digest.hexdigest()


def digest_of(value: object) -> str:
    """Return the SHA-256 of a value as JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Errors   OSError if it cannot be read"""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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

    On a file system without locks nothing is locked.

    where, rule   of the error

    Errors   RuntimeError if another process has locked it, ValueError for a symbolic link
    """
    file = open_no_link(path, "a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise refusal(RuntimeError, where, rule, {"folder": path.parent}, "Wait for its end, or stop it.") from None
    except OSError:
        return file  # the file system has no locks
    return file


def set_aside(path: Path, what: str) -> None:
    """Rename a file to free its name, for example to `metrics.jsonl.damaged-1`; it is never deleted."""
    number = 0
    while path.exists():
        number += 1
        aside = path.with_name(f"{path.name}.{what}-{number}")
        if not aside.exists():
            os.replace(path, aside)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, as far as the system permits."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def sync(descriptor: int) -> None:
    """Flush an open file to the disk, where its file system can.

    Errors   OSError if there is no room, or the disk fails
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (*LACKING, *FORBIDDEN):
            raise


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Flush the names in a folder to the disk, so that renamed and removed files survive a power cut."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # it may be written but not read, or the system opens no folders
        return
    try:
        sync(descriptor)
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
        if isinstance(error, IsADirectoryError):
            advice = "It is a folder: name a file in it."
        raise refusal(type(error), where, "the file must be readable", got, advice) from error


def matching_files(source: str, where: str) -> list[Path]:
    """Return the file itself, or every file that the glob matches, sorted.

    Errors   FileNotFoundError if there is no such file or the glob matches none; `where` opens the message
    """
    path = expanded(source)
    if path.is_file():
        return [path]
    require(not path.is_dir(), where, "the source must name a file", {"source": source}, "Give a file or a glob.")
    rule, advice = "the source must be a regular file", "Write what it gives to a file."
    require(not path.exists(), where, rule, {"source": source}, advice)
    if not glob.has_magic(source):
        raise refusal(FileNotFoundError, where, "the file must exist", {"source": source}, "Check the path.")
    paths = sorted(path for path in _matches(path) if path.is_file())
    rule, advice = "the glob must match at least one file", "Check the path; ** spans folders."
    require(bool(paths), where, rule, {"source": source}, advice, FileNotFoundError)
    return paths


def _matches(pattern: Path) -> set[Path]:
    """Return what a glob matches; ** enters no links to folders, which may lead in circles."""
    parts = pattern.parts
    if "**" not in parts:
        return set(map(Path, glob.glob(str(pattern))))
    place, paths = parts.index("**"), set[Path]()
    for start in glob.glob(str(Path(*parts[:place]))):
        for parent, folders, _ in os.walk(start):
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths |= _matches(Path(glob.escape(parent), *(parts[place + 1 :] or ["*"])))
    return paths
