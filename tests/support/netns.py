"""A network of hosts within this machine: one switch, and namespaces for each host, gone when the test is."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

_SUBNET = "10.77.0"
_TOOLS = ("ip", "bridge", "tc", "unshare", "nsenter")


class Host:
    """A host: an address, a name that resolves to 127.0.1.1 on it as Debian has it, and its own processes.

    It lives as long as the `cat` that is its first process, and that as long as the pipe to it: all ends with us.
    """

    def __init__(self, name: str, address: str) -> None:
        """Brings the host up, without a network."""
        self.name, self.address = name, address
        self._programs: list[subprocess.Popen[bytes]] = []
        self._holder = subprocess.Popen(
            [
                *("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-c", "ip link set lo up && echo up && exec cat"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != b"up\n":
            why = self._holder.stderr.read().decode().strip()
            self.close()
            raise OSError(why)
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self.pid = int(children[0])

    def settle(self, directory: Path) -> None:
        """Gives the host its name, and the file that names are looked up in."""
        hosts = directory / f"hosts-{self.name}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        self.run("hostname", self.name)
        self.run("mount", "--bind", str(hosts), "/etc/hosts")

    def run(self, *command: str) -> str:
        """Runs a command on the host and returns what it printed."""
        return _run(*self._enter, *command)

    def start(
        self, command: Sequence[str], log: IO[bytes], *, env: Mapping[str, str], cwd: Path, **pipes: Any
    ) -> subprocess.Popen[bytes]:
        """Starts a program on the host; its errors go to `log`, and so does its output unless `pipes` say otherwise."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, **pipes}
        self._programs.append(subprocess.Popen([*self._enter, *command], stderr=log, env=dict(env), cwd=cwd, **streams))
        return self._programs[-1]

    def close(self) -> None:
        """Ends the host with all that runs on it."""
        self._holder.kill()
        for process in (self._holder, *self._programs):
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
            process.wait()

    @property
    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", "--"]


class Network:
    """Hosts on one switch, each at its port."""

    def __init__(self, switch: Host, hosts: Sequence[Host]) -> None:
        """Connects hosts that are up."""
        self._switch, self._hosts = switch, {host.name: host for host in hosts}
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        for host in hosts:
            ends = ("name", host.name, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            # By the pids that this process knows them by: a host knows others by none.
            _run("nsenter", "--target", str(switch.pid), "--net", "ip", "link", "add", *ends)
            switch.run("ip", "link", "set", host.name, "master", "switch", "up")
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def part(self, *names: str) -> None:
        """Lets nothing through between these hosts; each still reaches all others."""
        for name in names:
            self._switch.run("bridge", "link", "set", "dev", name, "isolated", "on")

    def unplug(self, name: str) -> None:
        """Cuts a host off from all others."""
        self._switch.run("ip", "link", "set", name, "down")

    def squeeze(self, rate: str) -> None:
        """Lets each host send and receive at no more than a rate, such as `1mbit`."""
        shape = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "500ms")
        for host in self._hosts.values():
            host.run("tc", "qdisc", "replace", "dev", "eth0", *shape)
            self._switch.run("tc", "qdisc", "replace", "dev", host.name, *shape)

    def heal(self) -> None:
        """Undoes whatever has been done to the network."""
        for host in self._hosts.values():
            self._switch.run("bridge", "link", "set", "dev", host.name, "isolated", "off")
            self._switch.run("ip", "link", "set", host.name, "up")
            for at, device in ((host, "eth0"), (self._switch, host.name)):
                if " tbf " in at.run("tc", "qdisc", "show", "dev", device):
                    at.run("tc", "qdisc", "delete", "dev", device, "root")


@contextmanager
def network(*names: str, directory: Path) -> Iterator[Network]:
    """Makes hosts with these names on one switch; they end, with all that runs on them, with the block."""
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if lacking:
        raise OSError(f"there is no {', '.join(lacking)} (Debian: iproute2, util-linux)")
    with ExitStack() as stack:
        switch = Host("switch", "")
        stack.callback(switch.close)
        hosts = []
        for number, name in enumerate(names, 1):
            hosts.append(Host(name, f"{_SUBNET}.{number}"))
            stack.callback(hosts[-1].close)
            hosts[-1].settle(directory)
        yield Network(switch, hosts)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
