"""Hosts of their own on one machine: they reach each other, and links are limited, cut and healed."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from namespaces import Hosts, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
ECHO = """
import socket
listening = socket.create_server(("", 7000))
print("ready", flush=True)
while True:
    connection = listening.accept()[0]
    while data := connection.recv(4096):
        connection.sendall(data)
"""
ASK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000), timeout=60)
for line in sys.stdin:
    connection.settimeout(float(line))
    try:
        connection.sendall(b"x")
        answer = connection.recv(1).decode()
    except TimeoutError:
        answer = "nothing"
    print(answer, flush=True)
"""


def python(hosts, host, code, *arguments):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(hosts.command(host, [sys.executable, "-c", code, *arguments]), text=True, **pipes)


def ask(process, seconds):
    """What somebody answers within so many seconds."""
    process.stdin.write(f"{seconds}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_link_is_cut_without_a_word_and_a_connection_goes_on_once_it_is_healed():
    with Hosts(2) as hosts:
        echo = python(hosts, 0, ECHO)
        assert echo.stdout.readline() == "ready\n"
        asking = python(hosts, 1, ASK, hosts.addresses[0])
        here = subprocess.Popen([sys.executable, "-c", ECHO.replace("7000", "7001")], stdout=subprocess.PIPE, text=True)
        try:
            assert here.stdout.readline() == "ready\n"
            assert python(hosts, 1, ASK.replace("7000", "7001"), hosts.here).communicate("60\n")[0] == "x\n"
            assert ask(asking, 60) == "x"
            hosts.cut(1)
            assert ask(asking, 1) == "nothing"
            hosts.heal(1)
            assert ask(asking, 60) == "x"
        finally:
            for process in (echo, asking, here):
                process.kill()
                process.communicate()
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert not re.search(rf"{hosts.names[0]}\b", left)


def test_a_link_is_limited_both_ways():
    with Hosts(1) as hosts:
        hosts.limit(0, "100mbit")
        hosts.limit(0, "1gbit")
        own, to_it = (
            subprocess.run(["tc", "-n", where, "qdisc", "show", "dev", device], capture_output=True, text=True).stdout
            for where, device in ((hosts.names[0], "eth0"), (hosts.switch, "port0"))
        )
        assert " rate 1Gbit " in own
        assert " rate 1Gbit " in to_it
        hosts.limit(0)
        hosts.limit(0)
