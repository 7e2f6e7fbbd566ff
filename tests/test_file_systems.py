"""Tests on file systems that lack sync of folders, links, locks or renaming: no checkpoint is lost there."""

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest
from command_lines import run
from small_runs import FLAGS, fit, losses_of, steps_in, tensors_of

import daskgpt
from daskgpt import evaluate, train
from daskgpt.config import files
from daskgpt.config.files import advice_on, appearing, check_writable, locked, rename, replacing, set_aside, sync_folder
from daskgpt.formats import safetensors
from daskgpt.formats.llmc import TOKENS, header_of, read_tokens
from daskgpt.training.audit import Audit
from daskgpt.training.checkpoint import checkpoints, point, pointed, prune

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
    monkeypatch.setattr("daskgpt.training.progress.Progress.say", lambda self, line: lines.append(line))
    return lines


def check_run(text, out, usual, said):
    """Train; compare checkpoints, `latest` and `best` with those of a usual file system; resume, load and audit."""
    fit(text, out, save_every=4, keep=1, validate_every=4)
    assert not any(line.startswith("checkpoint") for line in said)
    assert steps_in(out) == steps_in(usual)
    for name in ("latest", "best"):
        assert pointed(out / name).name == pointed(usual / name).name
        model = daskgpt.load(usual / name)[1]
        for path in (out / name, out / name / "model.safetensors"):
            assert all((values == model[key]).all() for key, values in daskgpt.load(path)[1].items())
    newest = steps_in(out)[-1]
    assert tensors_of(out, newest) == tensors_of(usual, newest)
    assert losses_of(out) == losses_of(usual)
    assert Audit(out, {}).faults == []
    assert len(daskgpt.fit(resume=out, run={"steps": 13}, quiet=True).losses) == 13
    assert pointed(out / "latest") == out / "step-00000013"
    assert not list(out.glob(".*.tmp"))


@pytest.mark.parametrize("number", SYNC, ids=errno.errorcode.get)
def test_folders_that_cannot_be_flushed(number, tmp_path, refusing):
    refusing("fsync", number, is_folder)
    with appearing(tmp_path / "folder", "test") as folder:
        (folder / "file").touch()
    assert (tmp_path / "folder" / "file").exists()


def test_file_system_that_lacks_everything(small_text, tmp_path, usual, refusing, said):
    refusing("fsync", errno.EINVAL)
    refusing("symlink", errno.EPERM)
    refusing("posix_fadvise", errno.EINVAL)
    refusing("setpriority", errno.EPERM)
    refusing("flock", errno.ENOLCK, module=fcntl)
    refusing("replace", errno.EEXIST, lambda source, target: os.path.lexists(target))
    refusing("rename", errno.EXDEV, is_folder)
    refusing("replace", errno.EXDEV, is_folder)
    check_run(small_text, tmp_path / "run", usual, said)
    assert (tmp_path / "run" / "latest").read_text() == "step-00000013\n"


@pytest.mark.parametrize("former", ["link", "text", "folder", "nothing"])
@pytest.mark.parametrize("links", [True, *LINKS], ids=str)
def test_a_pointer_of_any_kind_is_replaced(former, links, tmp_path, refusing):
    link = tmp_path / "latest"
    (tmp_path / "step-00000001").mkdir()
    if former == "link":
        link.symlink_to("step-00000001")
    elif former == "text":
        link.write_text("step-00000001\n")
    elif former == "folder":
        link.mkdir()
    assert pointed(link) == (tmp_path / "step-00000001" if former in ("link", "text") else None)
    if links is not True:
        refusing("symlink", links)
    point(link, "step-00000002")
    assert (pointed(link), link.is_symlink()) == (tmp_path / "step-00000002", links is True)
    assert (tmp_path / "latest.copy-1").exists() == (former == "folder")


@pytest.mark.parametrize("content", [b"", b"../step-00000001", b"step-1", b"\xff\xfe", b"step-00000001" * 9, b"/etc"])
def test_other_files_point_to_no_checkpoint(content, tmp_path):
    (tmp_path / "latest").write_bytes(content)
    assert pointed(tmp_path / "latest") is None


def test_commands_follow_text_files(small_text, tmp_path, refusing, capfd):
    refusing("symlink", errno.EOPNOTSUPP)
    out, flags = tmp_path / "run", ["--data", str(small_text), *FLAGS.split(), "--steps", "4"]
    assert train.main([*flags, "--validate-every", "2", "--out", str(out)]) == 0
    assert evaluate.main([str(out / "best"), "--data", str(small_text)]) == 0
    assert train.main([*flags, "--init", str(out / "latest"), "--out", str(tmp_path / "tuned")]) == 0
    with pytest.raises(ValueError, match="--resume must name the folder of a run"):
        train.main(["--resume", str(out / "latest")])


def test_what_fails_after_a_checkpoint_loses_nothing(small_text, tmp_path, said, monkeypatch):
    out = tmp_path / "run"

    def no_pointer(link, name):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("daskgpt.training.run_folder.point", no_pointer)
    assert fit(small_text, out, save_every=5).checkpoint == out / "step-00000012"
    assert steps_in(out) == [5, 10, 12]
    assert sum("is saved, but latest" in line for line in said) == 3


NUMBERS = [
    (errno.ENOSPC, "Free space"),
    (errno.EDQUOT, "Free space"),
    (errno.EFBIG, "limit on the size of files"),
    (errno.EROFS, "permissions or its mount"),
    (errno.EINVAL, "file system lacks"),
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
    assert advice in advice_on(error.value.__cause__.__cause__)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failing_disk_is_an_error(number, tmp_path, refusing):
    refusing("fsync", number)
    with pytest.raises(OSError, match="all of the file must be written"), replacing(tmp_path / "file", "test"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["mounted", "link"])
def test_an_empty_folder_that_stays_is_filled(place, tmp_path, refusing):
    if place == "link":
        (tmp_path / "there").mkdir()
        (tmp_path / "folder").symlink_to("there")
    else:
        (tmp_path / "folder").mkdir()
        refusing("rmdir", errno.EBUSY, lambda path, *others: Path(path) == tmp_path / "folder")
    with appearing(tmp_path / "folder", "test") as folder:
        (folder / "file").touch()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]
    assert not list(tmp_path.glob(".*"))


def test_folders_that_cannot_be_opened_are_not_flushed(tmp_path, refusing):
    refusing("open", errno.EACCES)
    sync_folder(tmp_path)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EEXIST, errno.EBUSY])
def test_what_cannot_be_renamed_is_copied(number, tmp_path, refusing):
    refusing("replace", number)
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").write_bytes(b"content")
    (tmp_path / "folder" / "link").symlink_to("inner")
    set_aside(tmp_path / "folder", "damaged")
    aside = tmp_path / "folder.damaged-1"
    assert (aside / "inner" / "file").read_bytes() == b"content"
    assert os.readlink(aside / "link") == "inner"
    assert list(tmp_path.iterdir()) == [aside]
    (tmp_path / "old").write_bytes(b"old")
    with replacing(tmp_path / "old", "test") as file:
        file.write(b"new")
    assert (tmp_path / "old").read_bytes() == b"new"
    with pytest.raises(OSError, match=os.strerror(number)):
        rename(aside, tmp_path)  # a folder with content is never replaced
    assert (aside / "inner" / "file").exists()


def test_a_copy_without_room_leaves_nothing(tmp_path, refusing, monkeypatch):
    refusing("replace", errno.EXDEV)
    refusing("fsync", errno.ENOSPC)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"content")
    with pytest.raises(OSError, match="No space"):
        rename(tmp_path / "folder", tmp_path / "other")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "file"]


def test_checkpoints_that_cannot_be_renamed_are_pruned(tmp_path, refusing):
    refusing("rename", errno.EXDEV)
    for step in range(3):
        (tmp_path / f"step-{step:08}").mkdir()
        (tmp_path / f"step-{step:08}" / "state.json").touch()
    prune(tmp_path, 1, 0)
    assert checkpoints(tmp_path) == [tmp_path / "step-00000002"]
    assert len(list(tmp_path.iterdir())) == 1


def test_lock_files_are_empty_also_those_of_older_versions(tmp_path):
    (tmp_path / ".lock").write_text("12345\n")
    with locked(tmp_path / ".lock", "test", "nobody else"):
        assert (tmp_path / ".lock").read_bytes() == b""
        with pytest.raises(RuntimeError, match=f"process={os.getpid() if files.LOCKS.exists() else 'unknown'}"):
            locked(tmp_path / ".lock", "test", "nobody else")
    locked(tmp_path / ".lock", "test", "nobody else").close()


def test_a_file_that_cannot_be_written_is_refused_with_its_reason(tmp_path, monkeypatch):
    for path, advice in [(tmp_path, "add a file name"), (tmp_path / "no" / "file", f"Make {tmp_path / 'no'} first")]:
        with pytest.raises(ValueError, match=advice):
            check_writable(path, "test", "--out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="permissions"):
        check_writable(tmp_path / "file", "test", "--out")


def test_files_that_cannot_be_mapped_are_read(small_text, tmp_path, usual, refusing):
    """As on some file systems of user programs."""
    config, parameters = daskgpt.load(usual)
    daskgpt.save(tmp_path / "model.bin", config, parameters)
    tokens = header_of(TOKENS, 1, 999) + np.arange(999, dtype="<u2").tobytes()
    (tmp_path / "tokens.bin").write_bytes(tokens)
    refusing("memmap", errno.ENODEV, module=np)
    refusing("safe_open", errno.ENODEV, module=safetensors)
    for path in (usual, tmp_path / "model.bin"):
        read = daskgpt.load(path)[1]
        assert all((read[name] == values).all() for name, values in parameters.items())
    assert read_tokens(tmp_path / "tokens.bin").tolist() == list(range(999))
    damaged = (usual / "latest" / "model.safetensors").read_bytes()[:-1]
    (tmp_path / "damaged.safetensors").write_bytes(damaged)
    with pytest.raises(ValueError, match="complete safetensors file"):
        daskgpt.load(tmp_path / "damaged.safetensors")


def test_prepared_folders_are_equal_in_every_file(small_text, tmp_path):
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        result = run("prepare", small_text, "--encoding", "bytes", "--out", folder)
        assert result.returncode == 0, result.stderr
    one, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert one == other
    assert one[".lock"] == b""
