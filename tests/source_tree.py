"""A copy of what builds the package, for tests that build it."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def copied_tree(tree):
    """Copy the files of the package, without what was built, into a new folder."""
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", ignore=unbuilt)
