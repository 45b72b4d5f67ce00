"""Two hosts on this machine: network namespaces joined by a cable that may be slow, and is pulled out and put back.

What runs on one of them sees its own interfaces and its own abstract sockets, and nothing of this machine's network.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import Cluster, ended, environment, wait_for

LINK = "cable"
GATEWAY_PORT, HTTP_PORT = 5700, 8000
_CLONE_NEWNET = 0x40000000
_QUEUE_MS = 300  # what a slow cable's queue takes in before it drops packets, in its own time
_BURST_BYTES = 16 * 2**10


class NoNamespaces(Exception):
    """This machine, or this user, cannot have hosts like these; the text says why."""


@dataclass(frozen=True)
class Host:
    """A network namespace with one end of the cable. Its servers are at `address`, its clients come from another one.

    So two hosts can be kept from each other in one direction of connecting only.
    """

    name: str
    number: int

    @property
    def address(self) -> str:
        """Where its servers are."""
        return f"10.77.0.{self.number}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is on this host, and so is what it starts."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        inside = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            _enter(inside)
            yield
        finally:
            _enter(before)
            os.close(inside)
            os.close(before)

    @contextmanager
    def unplugged(self) -> Iterator[None]:
        """This end of the cable is out."""
        self.ip("link", "set", LINK, "down")
        try:
            yield
        finally:
            self.ip("link", "set", LINK, "up")

    @contextmanager
    def cut_off(self, address: str) -> Iterator[None]:
        """No packet goes to servers at this address; theirs come."""
        self.ip("route", "add", "blackhole", address)
        try:
            yield
        finally:
            self.ip("route", "del", "blackhole", address)

    def ip(self, *command: str) -> None:
        """Changes its network."""
        _run("ip", "-netns", self.name, *command)

    def start(self, folder: Path, command: str, **options: object) -> "subprocess.Popen[bytes]":
        """`kvrelay COMMAND` on this host; its log lies in `folder`."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        with self.entered(), (folder / f"{command}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "kvrelay", command, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(),
            )


@contextmanager
def two_hosts(bits_per_s: int) -> Iterator[tuple[Host, Host]]:
    """Joined by a cable of this speed in each direction; gone afterwards.

    Raises:
        NoNamespaces: that is not possible here.
    """
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NoNamespaces(f"{' and '.join(missing)} of iproute2 not found")
    if os.geteuid():
        raise NoNamespaces("only root makes network namespaces")
    hosts = [Host(f"kvrelay-{os.getpid()}-{number}", number) for number in (1, 2)]
    with ExitStack() as stack:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
            stack.callback(_run, "ip", "netns", "del", host.name)
        a, b = hosts
        _run("ip", "link", "add", LINK, "netns", a.name, "type", "veth", "peer", "name", LINK, "netns", b.name)
        for host in hosts:
            _set_up(host, bits_per_s)
        with a.entered():
            pass
        yield a, b


def _set_up(host: Host, bits_per_s: int) -> None:
    for address in (f"10.77.0.{100 + host.number}", host.address):  # the first one is that of clients
        host.ip("addr", "add", f"{address}/24", "dev", LINK)
    for device in ("lo", LINK):
        host.ip("link", "set", device, "up")
    bounds = ("rate", f"{bits_per_s}bit", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms")
    _run("tc", "-netns", host.name, "qdisc", "add", "dev", LINK, "root", "tbf", *bounds)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"`{' '.join(command)}` says: {done.stderr.strip()}")


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise NoNamespaces(f"a namespace cannot be entered: {os.strerror(ctypes.get_errno())}")


@contextmanager
def cluster_of(
    here: Host, there: Host, folder: Path, model: Path, *, apart: str, **options: object
) -> Iterator[Cluster]:
    """The gateway, a worker and the calling thread on the first host; the worker of the role `apart` on the second."""
    shared: dict[str, object] = {"model": model, "cache_dir": folder / "cache", "heartbeat_s": 0.1}
    gateway = f"tcp://{here.address}:{GATEWAY_PORT}"
    worker = {**shared, **options, "gateways": gateway, "dtype": "float32", "threads": 1}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.append(here.start(folder, "gateway", **shared, listen=gateway, port=HTTP_PORT))
        for role in ("prefill", "decode"):
            host = there if role == apart else here
            processes.append(host.start(folder, role, **worker, bind=host.address))
        cluster = Cluster(f"http://127.0.0.1:{HTTP_PORT}", processes[0], folder / "gateway.log")
        with here.entered():
            wait_for(f"two usable workers, see {folder}", lambda: cluster.usable() == 2, 60)
            yield cluster
    finally:
        codes = ended(processes)
    assert codes == [0] * len(processes)
