"""Tests of hosts of their own on one machine: they reach each other, and links are limited, cut and healed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from machines import started, wait_until
from namespaces import Hosts, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
ASK = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2]))"


def test_a_link_is_cut_and_healed():
    with Hosts(2) as hosts, started(hosts.command(0, [sys.executable, "-m", "http.server", "7000"])):

        def reached(seconds=60):
            ask = hosts.command(1, [sys.executable, "-c", ASK, hosts.addresses[0], str(seconds)])
            return subprocess.run(ask, capture_output=True).returncode == 0

        wait_until(reached, "an answer")
        hosts.cut(1)
        assert not reached(2)
        hosts.heal(1)
        wait_until(reached, "an answer")
    assert hosts.names[0] not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()


def test_a_link_is_limited_both_ways():
    with Hosts(1) as hosts:
        hosts.limit(0, "100mbit")
        hosts.limit(0, "1gbit")
        for where, device in ((hosts.names[0], "eth0"), (hosts.switch, "port0")):
            shown = subprocess.run(["tc", "-n", where, "qdisc", "show", "dev", device], capture_output=True, text=True)
            assert " rate 1Gbit " in shown.stdout
        for _ in range(2):
            hosts.limit(0)
