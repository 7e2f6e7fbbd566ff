"""Control groups of this process, by files in a temporary folder."""

import os

from daskgpt.schedulers import machine


def control_groups(tmp_path, monkeypatch, cgroup="", files=()):
    """Let this process be in the control groups of some files."""
    for name, text in {"cgroup": cgroup, **dict(files)}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
