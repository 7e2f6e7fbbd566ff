"""The files of cluster/ that need other programs than Python and bash: what of them can be checked without."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from command_lines import PATIENCE
from test_cluster import README, ROOT

from daskgpt.schedulers.allocator import ENVIRONMENT
from daskgpt.schedulers.cluster import BETWEEN_TASKS
from daskgpt.train import parser

FOLDER = ROOT / "cluster"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
SPEC = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())["spec"]
PODS = [SPEC["job"]["spec"], SPEC["cluster"]["spec"]["scheduler"]["spec"], SPEC["cluster"]["spec"]["worker"]["spec"]]
COMMANDS = [shlex.split(COMPOSE[name]["command"]) for name in ("train", "scheduler", "worker")]
COMMANDS += [pod["containers"][0]["args"] for pod in PODS]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_containers_start_what_there_is(command):
    if command[:3] == ["python", "-m", "daskgpt.train"]:
        assert parser().parse_args(command[3:]).steps == 100
        return
    shown = subprocess.run([sys.executable, "-m", *command[:2], "--help"], capture_output=True, text=True)
    known = set(re.findall(r"--[a-z-]+", shown.stdout))
    assert {word.split("=")[0] for word in command if word.startswith("--")} <= known


def test_all_members_of_a_cluster_of_containers_have_its_certificate():
    for name in ("train", "scheduler", "worker"):
        assert COMPOSE[name]["environment"]["DASK_CONFIG"] == "/certificates/cluster/dask.yaml"
        assert "certificates:/certificates" in COMPOSE[name]["volumes"]
    for pod in PODS:
        (container,) = pod["containers"]
        assert {"name": "DASK_CONFIG", "value": "/tmp/daskgpt-certificates/dask.yaml"} in container["env"]
        assert container["volumeMounts"][0]["mountPath"] == "/tmp/daskgpt-certificates"
        assert pod["volumes"][0]["secret"] == {"secretName": "daskgpt-certificates"}


def test_every_launcher_is_in_the_readme_and_every_shell_script_is_one():
    table = README.read_text().split("## ")[0]
    files = {path.name for path in FOLDER.iterdir() if path.is_file()} - {"README.md"}
    assert files - set(re.findall(r"\]\(([\w.]+)\)", table)) == {"certificates.sh"}
    for script in FOLDER.glob("*.sh"):
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.slow
def test_the_readmes_script_trains_on_a_client(tmp_path):
    text = README.read_text().split("## From Python")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "script.py").write_text(text.replace("steps=50", "steps=3"))
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "scheduler  LocalCluster at tcp://127.0.0.1:" in done.stdout
    assert (tmp_path / "runs" / "client" / "latest").exists()


def test_the_script_and_the_readme_set_what_clusters_of_ours_set():
    script, readme = (FOLDER / "start.sh").read_text(), README.read_text()
    for name, (_, own) in BETWEEN_TASKS.items():
        variable = "DASK_" + name.upper().replace(".", "__").replace("-", "_")
        assert f"{variable}:-{own}" in script
        assert f"{variable}={own}" in readme
    for name, own in ENVIRONMENT.items():
        assert f"{name}={own}" in script
        assert f"{name}={own}" in readme
