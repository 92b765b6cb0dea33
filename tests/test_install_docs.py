"""The pages on installation: their first lines work, and every extra is in the table."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools

import tickwheel
from source_tree import copied_tree

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TOOLS = {"test", "check", "docs", "bench", "fuzz"}
SECONDS = 300


def first_commands(page):
    """Return the commands of a page's first block."""
    block = re.search(
        r"^```console\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    return re.findall(r"^\$ (.*)$", block[1], re.MULTILINE)


@pytest.fixture
def shell(tmp_path):
    """Run commands in a copy of the checkout, without a network."""
    tree, packages = tmp_path / "checkout", tmp_path / "packages"
    copied_tree(tree)
    packages.mkdir()  # what pip would download
    installed = Path(setuptools.__file__).parent.parent
    for part in (*installed.glob("setuptools*"), installed / "_distutils_hack"):
        (packages / part.name).symlink_to(part)
    environ = {
        **{name: os.environ[name] for name in os.environ if not name.startswith("TICKWHEEL_")},
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # means: without isolation
        "PIP_NO_COMPILE": "1",
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": str(packages),
        "TICKWHEEL_PURE": "1",
    }

    def run(*commands):
        script = "\n".join(("set -e", *commands))
        return subprocess.run(
            ["bash", "-c", script], cwd=tree, env=environ, timeout=SECONDS, check=True,
            capture_output=True, text=True,
        ).stdout  # fmt: skip

    return run


def test_the_tutorial_begins_in_a_checkout_and_ends_up_in_an_empty_directory(shell):
    show = first_commands("install.md")[-1]
    version = f"\n$ {show}\n{tickwheel.__version__}\n"
    assert version in (DOCS / "install.md").read_text("utf-8")
    printed = shell(*first_commands("tutorials/durable-orders.md"), show, "which python; ls -A")
    *_, shown, python, listed = printed.splitlines()
    assert shown == tickwheel.__version__
    assert python.endswith("/shop/.venv/bin/python")
    assert listed == ".venv"


def test_the_page_on_installation_begins_as_the_tutorial():
    *install, _ = first_commands("install.md")
    *tutorial, change = first_commands("tutorials/durable-orders.md")
    assert change == "cd ~/shop"
    assert [one.replace("~/shop/", "") for one in tutorial] == install


def test_the_tutorial_of_the_service_differs_only_by_its_folder_and_what_it_installs():
    plain = first_commands("tutorials/durable-orders.md")
    service = first_commands("tutorials/service.md")
    assert service[-1] == "cd ~/shop-service"  # a folder of its own, empty as well
    service = [one.replace("~/shop-service", "~/shop") for one in service]
    assert [one for one in service if one not in plain] == ["pip install '.[server]' fastapi"]
    assert len(service) == len(plain)


def test_every_extra_is_in_the_table():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    page = (DOCS / "install.md").read_text("utf-8").partition("## Extras")[2]
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(project["optional-dependencies"].keys() - TOOLS)
