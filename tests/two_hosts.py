"""Two network namespaces as two hosts, each with a name of its own: what a launcher of several hosts is tested on."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

NAMED = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[list[tuple[list[str], str]]]:
    """[(prefix of a command that runs on the host, the host's address)]; skips where the machine forbids it.

    Args:
      folder: an empty one, for the hosts' /etc/hosts.
    """
    if not (shutil.which("ip") and shutil.which("unshare")) or os.geteuid() != 0:
        pytest.skip("network namespaces need `ip`, `unshare` and root")
    tag = f"{os.getpid() % 10000}"
    names = [f"host{n}t{tag}" for n in range(2)]
    addresses = [f"10.213.7.{n + 1}" for n in range(2)]
    table = folder / "hosts"
    table.write_text("".join(f"{a} {n}\n" for a, n in zip(addresses, names)) + "127.0.0.1 localhost\n")
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", f"v0t{tag}", "type", "veth", "peer", "name", f"v1t{tag}")
            for n, name in enumerate(names):
                _ip("link", "set", f"v{n}t{tag}", "netns", name)
                _ip("-n", name, "addr", "add", f"{addresses[n]}/24", "dev", f"v{n}t{tag}")
                _ip("-n", name, "link", "set", f"v{n}t{tag}", "up")
                _ip("-n", name, "link", "set", "lo", "up")
            prefixes = [
                ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", NAMED, "sh", name, str(table),
                 "env", f"GLOO_SOCKET_IFNAME=v{n}t{tag}"] for n, name in enumerate(names)]
            for prefix in prefixes:
                subprocess.run([*prefix, "true"], check=True, capture_output=True, timeout=10)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces: {error.stderr.decode().strip()}")
        yield list(zip(prefixes, addresses))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


def run_on_both(hosts: Sequence[tuple[list[str], str]], command: Sequence[str], deadline_s: float) -> list[str]:
    """What a command prints on each host; it is told `--host N --coordinator ADDRESS:PORT` in the place of "HOST"."""
    at = command.index("HOST")
    coordinator = f"{hosts[0][1]}:29511"
    started = [
        subprocess.Popen(
            [*prefix, *command[:at], "--host", str(n), "--coordinator", coordinator, *command[at + 1 :]],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n, (prefix, _) in enumerate(hosts)
    ]
    try:
        answers = [process.communicate(timeout=deadline_s) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), answers
    return [said for said, _ in answers]
