"""The machine and the versions that a run was made on; nothing that tells whose machine it was."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe() -> dict[str, str]:
    """Processor, cores, caches, memory and system."""
    return {
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "caches": caches(),
        "memory": f"{memory_gib()} GiB",
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(*packages: str) -> dict[str, str]:
    """Python, tickwheel and these packages."""
    found = {package: installed(package) for package in ("tickwheel", *packages)}
    return {"Python": platform.python_version(), **found}


def installed(package: str) -> str:
    """The version of a Python package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """The processor's model name, as the kernel knows it."""
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def caches() -> str:
    """The data caches that the first core sees."""
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if read(index / "type").strip() != "Instruction":
            found.append(f"L{read(index / 'level').strip()} {read(index / 'size').strip()}")
    return ", ".join(found) or "unknown"


def memory_gib() -> int:
    """Main memory."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def read(path: str | Path) -> str:
    """The file's text, or nothing when there is no such file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
