"""Who may reach a cluster: a warning where that is anybody, and what to do where it is not the one who asks."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterable

from distributed.comm.addressing import get_address_host, parse_address

CERTIFICATES = "Set DASK_CONFIG to the cluster's dask.yaml: see Safety in cluster/README.md."
_said: set[str] = set()


def warn_of_open(addresses: Iterable[str]) -> None:
    """One line on stderr, once a process for each cluster, where other machines can reach one of these addresses of a
    scheduler and its workers and it speaks without TLS.
    """
    if (found := next(filter(is_open, addresses), "")) and found not in _said:
        _said.add(found)
        text = f"warning: no TLS: whoever reaches {found} can run code as you (cluster/README.md)"
        print(text, file=sys.stderr, flush=True)


def is_open(address: str) -> bool:
    """Whether other machines can reach an address, and what it says is neither encrypted nor asks for a certificate.

    A name that is no number may be any machine's, but for localhost.
    """
    if parse_address(address)[0] in ("tls", "wss", "inproc"):
        return False
    host: str = get_address_host(address)
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host != "localhost"


def reason_and_advice(error: Exception) -> tuple[str, str]:
    """Why a scheduler does not answer, in Dask's words where they say it, and what to do."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "ssl_context" in said:
        return "this process has no certificate", CERTIFICATES
    if "TLS certificate" in said:
        return "its certificate is another cluster's than this process has", CERTIFICATES
    if "encryption required" in said:
        return "DASK_CONFIG or another setting of Dask asks for TLS", "Give an address that begins with tls://."
    if "TCP (closed)" in said:
        return "it closed the connection", "Give an address that begins with tls:// where it speaks TLS."
    return said, "Start one with `dask scheduler` and check the address."
