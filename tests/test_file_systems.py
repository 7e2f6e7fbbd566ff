"""Tests on file systems that lack sync of folders, links or locks: no checkpoint is lost there."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from small_runs import STEPS, fit, losses_of, steps_in, tensors_of

import daskgpt
from daskgpt.audit import Audit
from daskgpt.config.files import appearing, check_writable, replacing, sync_folder
from daskgpt.training.checkpoint import point

SYNC = [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EPERM]
LINKS = [errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EIO]


@pytest.fixture
def refusing(monkeypatch):
    """Let a function of `os` (or another module) fail with an error number where a condition holds of its arguments."""

    def refuse(name, number, holds=lambda *arguments: True, module=os):
        function = getattr(module, name)

        def refused(*arguments, **options):
            if holds(*arguments):
                raise OSError(number, os.strerror(number), *map(str, arguments[:1]))
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, refused)

    return refuse


def is_folder(place, *others):
    """Whether a descriptor or a path is a folder's."""
    path = Path(f"/proc/self/fd/{place}").resolve() if isinstance(place, int) else Path(place)
    return path.is_dir() and not path.is_symlink()


@pytest.fixture(scope="module")
def usual(small_text, tmp_path_factory):
    out = tmp_path_factory.mktemp("usual") / "run"
    fit(small_text, out, save_every=4, keep=1, validate_every=4)
    return out


@pytest.fixture
def said(monkeypatch):
    """The lines that runs print above their progress."""
    lines = []
    monkeypatch.setattr("daskgpt.training.metrics.Progress.say", lambda self, line: lines.append(line))
    return lines


@pytest.mark.parametrize("number", SYNC, ids=errno.errorcode.get)
def test_folders_that_cannot_be_flushed(number, tmp_path, refusing):
    refusing("fsync", number, is_folder)
    with appearing(tmp_path / "folder", "test") as folder:
        (folder / "file").touch()
    assert (tmp_path / "folder" / "file").exists()


@pytest.mark.parametrize("number", LINKS, ids=errno.errorcode.get)
def test_file_systems_without_links_have_no_latest(number, tmp_path, refusing):
    refusing("symlink", number)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Check the disk"):
            point(tmp_path / "latest", "step-00000002")
    else:
        point(tmp_path / "latest", "step-00000002")
    assert list(tmp_path.iterdir()) == []


def test_file_system_that_lacks_everything(small_text, tmp_path, usual, refusing, said):
    refusing("fsync", errno.EINVAL)
    refusing("symlink", errno.EPERM)
    refusing("posix_fadvise", errno.EINVAL)
    refusing("flock", errno.ENOLCK, module=fcntl)
    out = tmp_path / "run"
    fit(small_text, out, save_every=4, keep=1, validate_every=4)
    assert not any(line.startswith("checkpoint") for line in said)
    assert steps_in(out) == steps_in(usual)
    assert not list(out.glob("latest")) + list(out.glob("best"))
    model = daskgpt.load(usual)[1]
    assert all((values == model[key]).all() for key, values in daskgpt.load(out)[1].items())
    assert tensors_of(out, STEPS) == tensors_of(usual, STEPS)
    assert losses_of(out) == losses_of(usual)
    assert Audit(out, {}).faults == []
    assert len(daskgpt.fit(resume=out, run={"steps": 13}, quiet=True).losses) == 13
    assert steps_in(out)[-1] == 13
    assert not list(out.glob(".*.tmp"))


@pytest.mark.parametrize("former", ["link", "file", "folder", "nothing"])
def test_a_pointer_of_any_kind_is_replaced(former, tmp_path):
    link = tmp_path / "latest"
    if former == "link":
        link.symlink_to("step-00000001")
    elif former == "file":
        link.write_text("step-00000001\n")
    elif former == "folder":
        link.mkdir()
    point(link, "step-00000002")
    assert os.readlink(link) == "step-00000002"
    assert (tmp_path / "latest.copy-1").exists() == (former == "folder")


def test_what_fails_after_a_checkpoint_loses_nothing(small_text, tmp_path, said, monkeypatch):
    out = tmp_path / "run"

    def no_pointer(link, name):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("daskgpt.training.checkpoint.point", no_pointer)
    assert fit(small_text, out, save_every=5).checkpoint == out / "step-00000012"
    assert steps_in(out) == [5, 10, 12]
    assert sum("is saved, but latest" in line for line in said) == 3


NUMBERS = [
    (errno.ENOSPC, "Free space"),
    (errno.EFBIG, "limit on the size of files"),
    (errno.EROFS, "permissions or its mount"),
    (errno.EOPNOTSUPP, "file system lacks"),
    (errno.EIO, "Check the disk"),
    (errno.ENAMETOOLONG, "shorter name"),
]


@pytest.mark.parametrize(("number", "advice"), NUMBERS)
def test_advice_fits_the_error(number, advice, small_text, tmp_path, refusing):
    with pytest.raises(OSError, match=advice), replacing(tmp_path / "file", "test"):
        raise OSError(number, os.strerror(number))
    refusing("mkdir", number, lambda path, *mode: "step-" in str(path))
    with pytest.raises(OSError, match=rf"{advice}.*start again") as error:
        fit(small_text, tmp_path / "run", steps=1)
    assert ("Free space" in str(error.value)) == (advice == "Free space")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failing_disk_is_an_error(number, tmp_path, refusing):
    refusing("fsync", number)
    with pytest.raises(OSError, match="all of the file must be written"), replacing(tmp_path / "file", "test"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_opened_are_not_flushed(tmp_path, refusing):
    refusing("open", errno.EACCES)
    sync_folder(tmp_path)


def test_a_file_that_cannot_be_written_is_refused_with_its_reason(tmp_path, monkeypatch):
    for path, advice in [(tmp_path, "add a file name"), (tmp_path / "no" / "file", f"Make {tmp_path / 'no'} first")]:
        with pytest.raises(ValueError, match=advice):
            check_writable(path, "test", "--out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="permissions"):
        check_writable(tmp_path / "file", "test", "--out")
