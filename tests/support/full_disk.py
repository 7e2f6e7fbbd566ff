"""A full disk, simulated by a limit on the size of files, which causes the same kind of error."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Limit the files of this process to `room` bytes within the context."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))  # Python ignores SIGXFSZ: writing fails with EFBIG
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
