"""Who may reach a cluster: certificates, real processes that have them and that do not, addresses of other machines."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from command_lines import PATIENCE
from test_cluster import ROOT, START, started, training, wait_until

from daskgpt.schedulers.security import is_open

CERTIFICATES = ROOT / "cluster" / "certificates.sh"
needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
OTHER = r"\(its certificate is another cluster's than this process has\)\."
ADVICE = r"Set DASK_CONFIG to the cluster's dask\.yaml: see Safety in cluster/README\.md\.\n"


@pytest.fixture(scope="module")
def environment():
    """What a terminal has: this Python first on the PATH, this checkout's package, no settings of Dask."""
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    own = {"PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT)}
    return {name: value for name, value in os.environ.items() if not name.startswith("DASK_")} | own


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(__file__).read_text())
    return path


@pytest.fixture(scope="module")
def certified(tmp_path_factory, environment):
    """Environments of two clusters' members: each has a certificate, of which the other knows nothing."""
    folder = tmp_path_factory.mktemp("it's safe")
    made = [certificates(folder / name, environment) for name in ("one", "two")]
    for path, done in zip(("one", "two"), made):
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("export DASK_CONFIG=")
        assert stat.S_IMODE((folder / path / "key.pem").stat().st_mode) == 0o600
    return [environment | {"DASK_CONFIG": str(folder / name / "dask.yaml")} for name in ("one", "two")]


def certificates(folder, environment, *days):
    command = [CERTIFICATES, folder, *days]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture(scope="module")
def tls(certified, tmp_path_factory):
    """Address of a cluster that the script has started with the first of the certificates, and what it said."""
    log = tmp_path_factory.mktemp("cluster") / "log"
    own, command = certified[0] | {"TMPDIR": str(log.parent)}, [START, "--workers", "2", "--port", "0"]
    with log.open("w") as file, started(command, own, stdout=file, stderr=file) as process:
        wait_until(lambda: "Ctrl-C stops" in log.read_text(), process)
        yield re.search(r"^scheduler  (\S+)$", log.read_text(), re.MULTILINE)[1], log


def train(text, scheduler, out, environment):
    command = training(text, scheduler, out, 3)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)


@needs_openssl
@pytest.mark.slow
def test_the_same_model_over_tls_on_a_cluster_and_a_local_one(tls, certified, environment, text, tmp_path):
    address, log = tls
    assert address.startswith("tls://127.0.0.1:")
    for name, scheduler, own in (
        ("threads", "threads", environment),
        ("cluster", address, certified[0]),
        ("local", "local", certified[0]),
        ("plain", "local", environment),
    ):
        done = train(text, scheduler, tmp_path / name, own)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
    models = {sha256(path.read_bytes()).hexdigest() for path in tmp_path.glob("*/latest/*.safetensors")}
    assert len(models) == 2, "one model and one optimizer's state"
    assert "no TLS" not in log.read_text()


@needs_openssl
@pytest.mark.slow
def test_a_client_without_the_certificate_is_refused_in_one_line(tls, certified, environment, text, tmp_path):
    address, _ = tls
    plain = address.replace("tls://", "tcp://")
    rule = "open_scheduler: a Dask scheduler must answer; got scheduler="
    for scheduler, own, said in (
        (address, environment, rf"{address} \(this process has no certificate\)\. {ADVICE}"),
        (
            address,
            certified[1],
            rf"{address} {OTHER} {ADVICE}",
        ),
        (
            plain,
            environment,
            rf"{plain} \(it closed the connection\)\. Give an address that begins with tls:// where it speaks TLS\.\n",
        ),
        (
            plain,
            certified[0],
            rf"{plain} \(DASK_CONFIG or another setting of Dask asks for TLS\)\. "
            r"Give an address that begins with tls://\.\n",
        ),
    ):
        done = train(text, scheduler, tmp_path / "run", own)
        assert done.returncode == 2
        assert re.fullmatch(rule + said, done.stderr), done.stderr
        assert not (tmp_path / "run").exists()


@needs_openssl
@pytest.mark.slow
def test_a_worker_without_the_certificate_is_refused(tls, certified, environment, tmp_path):
    address, _ = tls
    count = "import sys, distributed as d; print(len(d.Client(sys.argv[1]).scheduler_info()['workers']))"
    for scheduler, own in (
        (address, environment),
        (address, certified[1]),
        (address.replace("tls://", "tcp://"), environment),
    ):
        command = ["dask", "worker", scheduler, "--host", "127.0.0.1", "--nthreads", "1", "--death-timeout", "3"]
        folder = ["--no-dashboard", "--local-directory", str(tmp_path)]
        done = subprocess.run([*command, *folder], env=own, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode != 0
        assert "Registered to" not in done.stderr
    asked = [sys.executable, "-c", count, address]
    found = subprocess.run(asked, env=certified[0], capture_output=True, text=True, timeout=PATIENCE)
    assert found.stdout == "2\n", found.stderr


@pytest.mark.parametrize(
    ("address", "reachable"),
    [
        ("tcp://127.0.0.1:8786", False),
        ("tcp://127.8.0.1:8786", False),
        ("tcp://[::1]:8786", False),
        ("tcp://localhost:8786", False),
        ("inproc://192.0.2.2/1/1", False),
        ("tls://192.0.2.2:8786", False),
        ("tcp://192.0.2.2:8786", True),
        ("tcp://[2001:db8::2]:8786", True),
        ("tcp://node0:8786", True),
        ("ws://192.0.2.2:8786", True),
    ],
)
def test_what_other_machines_can_reach_without_tls(address, reachable):
    assert is_open(address) is reachable


NAMESPACE = """
set -e
ip link set lo up
ip addr add 192.0.2.9/32 dev lo
"$1" --workers 1 --port 0 --host 192.0.2.9 --scheduler-file "$2" &
cluster=$!
trap 'kill $cluster; wait' EXIT
until [ -s "$2" ]; do sleep 0.1; done
shift 2
"$@"
"""


@pytest.mark.slow
def test_a_cluster_that_others_can_reach_is_warned_of_once(environment, text, tmp_path):
    """In a network namespace of its own, whose one machine has an address that is not loopback."""
    isolated = ["unshare", "--map-root-user", "--net"]
    probe = [*isolated, "ip", "address", "add", "192.0.2.9/32", "dev", "lo"]
    if not shutil.which("unshare") or not shutil.which("ip") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("network namespaces cannot be made here")
    file = tmp_path / "scheduler.json"
    command = [*isolated, "bash", "-c", NAMESPACE, "namespace", START, file]
    trained = [*command, *training(text, f"file:{file}", tmp_path / "run", 3)]
    done = subprocess.run(trained, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    warnings = [line for line in done.stderr.splitlines() if "no TLS" in line]
    assert len(warnings) == 2
    assert (
        warnings[0] == "start.sh: no TLS: whoever reaches 192.0.2.9 can run code here; see Safety in cluster/README.md"
    )
    said = r"warning: no TLS: whoever reaches tcp://192\.0\.2\.9:\d+ can run code as you \(cluster/README\.md\)"
    assert re.fullmatch(said, warnings[1])
    assert "dashboard  http://127.0.0.1:" in done.stdout, "which nobody has asked to be seen by others"
    assert (tmp_path / "run" / "latest").exists()


@needs_openssl
def test_certificates_are_for_a_time(tmp_path, environment):
    assert certificates(tmp_path / "day", environment, "1").returncode == 0
    check = ["openssl", "x509", "-in", str(tmp_path / "day" / "cert.pem"), "-noout", "-checkend"]
    assert subprocess.run([*check, "80000"], capture_output=True).returncode == 0
    assert subprocess.run([*check, "90000"], capture_output=True).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "certificates.sh: a folder must be named, and perhaps days; got 0 arguments. Try --help.\n"),
        (["new", "soon"], "certificates.sh: DAYS must be a positive number; got soon. Try 365.\n"),
        (
            ["."],
            "certificates.sh: the folder must be new; got .. Give another, or remove it: its key ends with it.\n",
        ),
    ],
)
def test_certificates_are_refused_in_one_line(arguments, said, environment, tmp_path):
    command = [CERTIFICATES, *arguments]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert list(tmp_path.iterdir()) == []


def test_certificates_show_how_they_are_used(environment):
    done = subprocess.run([CERTIFICATES, "--help"], env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0
    assert "export DASK_CONFIG=FOLDER/dask.yaml" in done.stdout
