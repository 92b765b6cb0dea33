"""Describe the machine and the versions of a run, without identifying the machine's owner."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe() -> dict[str, str]:
    """Return processor, cores, caches, memory and system."""
    return {
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "caches": caches(),
        "memory": f"{memory_gib()} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, tickwheel and these packages."""
    found = {package: package_version(package) for package in ("tickwheel", *packages)}
    return {"Python": platform.python_version(), **found}


def package_version(package: str) -> str:
    """Return the version of a Python package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """Return the processor's model name, as the kernel reports it."""
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def caches() -> str:
    """Return the data caches of the first core."""
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if read(index / "type").strip() != "Instruction":
            found.append(f"L{read(index / 'level').strip()} {read(index / 'size').strip()}")
    return ", ".join(found) or "unknown"


def memory_gib() -> int:
    """Return the size of main memory."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def read(path: str | Path) -> str:
    """Return the file's text, or an empty string if the file does not exist."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
