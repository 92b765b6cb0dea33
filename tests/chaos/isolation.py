"""Runs a program in namespaces of its own: network, mounts and processes.

When the program ends, the kernel ends all its processes and removes its networks and mounts. Only
its control group is left, which is removed here.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import servers

CGROUP = "TICKWHEEL_CHAOS_CGROUP"  # the variable with the path of the program's control group
HIERARCHIES = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
TOOLS = {"nft": "nftables", "ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
UNSHARE = ("--net", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")
PATIENCE_SECONDS = 30.0


def obstacle():
    """Return why this machine cannot isolate a program, or None if it can."""
    if os.geteuid():
        return "namespaces and control groups need root"
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if missing:
        return f"apt-get install {' '.join(missing)}"
    if hierarchy() is None:
        return "the machine has no control groups of version 2, or their freezer is missing"
    tried = subprocess.run(
        ["unshare", *UNSHARE, "ip", "link", "set", "lo", "up"],
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    if tried.returncode:
        return f"namespaces need CAP_SYS_ADMIN: {tried.stderr.strip()}"
    return None


def hierarchy():
    """Return where control groups of version 2 are mounted, or None."""
    found = [path for path in HIERARCHIES if (path / "cgroup.controllers").exists()]
    return found[0] if found and os.access(found[0], os.W_OK) else None


class Group:
    """A control group, whose processes can be frozen together."""

    def __init__(self, path):
        self.path = path
        path.mkdir()

    def add(self, pid):
        (self.path / "cgroup.procs").write_text(f"{pid}\n")

    def freeze(self):
        """Stop all its processes; they do not notice."""
        (self.path / "cgroup.freeze").write_text("1\n")
        servers.wait_until(self._frozen, f"{self.path.name} is frozen", PATIENCE_SECONDS)

    def thaw(self):
        (self.path / "cgroup.freeze").write_text("0\n")

    def _frozen(self):
        return "frozen 1" in (self.path / "cgroup.events").read_text()

    def remove(self):
        """Kill what is left in it and below, and remove it."""
        (self.path / "cgroup.kill").write_text("1\n")
        for below in sorted(self.path.rglob("*/"), reverse=True):
            if below.is_dir():
                remove_directory(below)
        remove_directory(self.path)


def remove_directory(path):
    """Remove an empty group; its last processes may still be ending."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return path.rmdir()
        except FileNotFoundError:
            return None
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def new_group(name):
    """Return a new group directly below the root; its name ends with this process's id."""
    found = hierarchy()
    assert found is not None, "there are no control groups of version 2"
    return Group(found / f"tickwheel-{name}-{os.getpid()}")


def run_isolated(argv, *, seconds, environment=None):
    """Run a program in its namespaces; return its exit code. It is killed after `seconds`."""
    group = new_group("chaos")
    directory = Path(tempfile.mkdtemp(prefix="tickwheel-chaos-"))
    directory.chmod(0o711)  # servers run as other users
    given = {**os.environ, CGROUP: str(group.path), "TMPDIR": str(directory)}
    command = [shutil.which("unshare"), *UNSHARE, *map(str, argv)]
    try:
        process = servers.launch(command, env=given | (environment or {}))
        try:
            return process.wait(seconds)
        except BaseException:
            process.send_signal(signal.SIGKILL)
            process.wait()
            raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            group.remove()
        shutil.rmtree(directory, ignore_errors=True)
