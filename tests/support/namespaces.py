"""Hosts with separate addresses on one machine: network namespaces on a switch, whose links can be cut.

    with Hosts(3) as hosts:                                       # root on Linux, with iproute2
        process = subprocess.Popen(hosts.command(0, ["dask", "scheduler", "--host", hosts.addresses[0]]))
        hosts.cut(2)                                              # silently: packets vanish, connections stay open
        hosts.heal(2)

This process reaches all of them, and they reach it at `hosts.here`. The switch is a bridge in a
separate namespace: the machine's network gets one more interface meanwhile and is otherwise unchanged.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

# 198.18.0.0/15 is set aside for measurements between networks (RFC 2544): nobody else's addresses.
NETWORK, MOST = "198.18.{network}.{host}", 100


def missing() -> str:
    """What of this machine prevents hosts, empty if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "bridge") if not shutil.which(tool)]
    return f"no {absent[0]}: install iproute2" if absent else ""


class Hosts:
    """So many hosts, numbered from 0.

    addresses  of the hosts
    here       the address of this process in their network
    """

    def __init__(self, count: int) -> None:
        """Errors   RuntimeError if the machine does not let us"""
        if reason := missing():
            raise RuntimeError(f"Hosts: this machine must have network namespaces; got none: {reason}.")
        self.count, self.network = count, self._interface()
        self.names = [f"dg{self.network}-{host}" for host in range(count)]
        self.switch = f"dg{self.network}-switch"
        self.addresses = [NETWORK.format(network=self.network, host=host + 1) for host in range(count)]
        self.here = NETWORK.format(network=self.network, host=254)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _interface(self) -> int:
        """The first number that nobody else uses, taken by an interface of this name."""
        for number in range(MOST):
            if self._ip(f"link add dg{number} type veth peer name dg{number}-peer", check=False):
                return number
        raise RuntimeError(f"Hosts: a network must be free; got {MOST} in use. See `ip link`, `ip netns`.")

    def _build(self) -> None:
        self._ip(f"netns add {self.switch}")
        self._ip(f"-n {self.switch} link add switch type bridge")
        self._ip(f"-n {self.switch} link set switch up")
        self._ip(f"link set dg{self.network}-peer netns {self.switch} name here")
        self._ip(f"-n {self.switch} link set here master switch up")
        self._ip(f"address add {self.here}/24 dev dg{self.network}")
        self._ip(f"link set dg{self.network} up")
        for host, (name, address) in enumerate(zip(self.names, self.addresses)):
            self._ip(f"netns add {name}")
            self._ip(f"-n {name} link set lo up")
            self._ip(f"-n {name} link add eth0 type veth peer name port{host} netns {self.switch}")
            self._ip(f"-n {name} address add {address}/24 dev eth0")
            self._ip(f"-n {name} link set eth0 up")
            self._ip(f"-n {self.switch} link set port{host} master switch up")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command there, as the process that is started: signals reach the command."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def cut(self, host: int) -> None:
        """Nothing reaches this host any more, nor leaves it."""
        self._run(f"bridge -n {self.switch} link set dev port{host} state 0")

    def heal(self, host: int) -> None:
        """What was cut is as before."""
        self._run(f"bridge -n {self.switch} link set dev port{host} state 3")

    def part(self, *hosts: int) -> None:
        """These hosts reach each other no more, silently; they reach all others."""
        for host in hosts:
            self._run(f"bridge -n {self.switch} link set dev port{host} isolated on")

    def kill(self, host: int) -> None:
        """End every process of a host with SIGKILL."""
        listed = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True)
        for process in map(int, listed.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def close(self) -> None:
        """Hosts are gone; processes that still run there keep a network that leads nowhere."""
        self._ip(f"link del dg{self.network}", check=False)
        for name in (*self.names, self.switch):
            self._ip(f"netns del {name}", check=False)

    def _ip(self, command: str, *, check: bool = True) -> bool:
        return self._run(f"ip {command}", check=check)

    def _run(self, command: str, *, check: bool = True) -> bool:
        """Whether it worked."""
        done = subprocess.run(command.split(), capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.returncode == 0
