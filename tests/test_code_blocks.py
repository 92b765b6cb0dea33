"""Every code block of the docs: run by a test that is named here, or listed with the reason."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tickwheel.cli.root import root

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```(\S[^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
CALL = re.compile(  # at the beginning of a line, after a variable, or inside $(…), a pipe or a loop
    r"(?:^|\$ |\$\(|\| |do |[A-Z_]=\S+ )tickwheel ((?:'[^']*'|\$\([^)]*\)|[^'|;<>)\n])*)",
    re.MULTILINE,
)
RUN_EVERYWHERE = {"python"}  # tests/test_readme.py runs each page's
NOT_CODE = {"text", "proto"}  # output; tests compare the files with those that are shown

# By page: the test that runs its blocks, or the first of several, and how many they run.
RUN = {
    "README.md": ("test_readme_service.py", 1),
    "docs/install.md": ("test_install_docs.py", 1),
    "docs/tutorials/durable-orders.md": ("durable/test_tutorial.py", 23),
    "docs/tutorials/service.md": ("test_tutorial_service.py", 21),
    "docs/how-to/channels.md": ("test_channel_docs.py", 6),
    "docs/how-to/durable-observe.md": ("durable/test_hooks.py", 5),
    "docs/how-to/durable-processes.md": ("durable/test_docs.py", 1),
    "docs/how-to/durable-retry.md": ("durable/test_docs.py", 1),
    "docs/how-to/durable-schedules.md": ("durable/test_docs.py", 2),
    "docs/how-to/durable-test-without-sleeping.md": ("durable/test_docs.py", 1),
    "docs/how-to/durable-web-frameworks.md": ("durable/test_forks.py", 10),
    "docs/how-to/durable-your-transaction.md": ("durable/test_docs.py", 4),
    "docs/how-to/migrate.md": ("test_migrate_docs.py", 8),
    "docs/how-to/service-celery.md": ("celery_app/test_docs.py", 2),
    "docs/how-to/service-clients.md": ("test_service_docs.py", 9),
    "docs/how-to/service-consume.md": ("consumer/test_docs.py", 2),
    "docs/how-to/service-curl.md": ("test_readme_service.py", 3),
    "docs/how-to/service-dashboard.md": ("web/test_mounts.py", 3),
    "docs/how-to/service-grpc.md": ("test_code_blocks.py", 1),
    "docs/how-to/service-messages.md": ("receiver/test_docs.py", 2),
    "docs/how-to/service-receive.md": ("receiver/test_frameworks.py", 1),
    "docs/how-to/use-asyncio.md": ("test_loop_servers.py", 2),
}
OPTIONS = "only its options are compared with the code"  # by the second test below
OTHERS = "it needs hosts, users or tools that the tests do not have"
SHORT = "an excerpt"

# By page and beginning of a block: why no test runs it.
NOT_RUN = {
    "README.md": {
        "pip install .": "tools/first-hour runs the first line, tools/dist the second",
        "make serve": "tools/first-hour runs the first line",
    },
    "docs/install.md": {
        "$ make dist": "tools/dist runs it",
        "$ pip install 'tickwheel[server]'": "the package is not published yet",
    },
    "docs/how-to/durable-observe.md": {
        "$ tickwheel dashboard": OPTIONS,
        "$ tickwheel worker": OPTIONS,
    },
    "docs/how-to/durable-processes.md": {
        "$ tickwheel worker shop:app worker": OPTIONS,
        "$ tickwheel worker shop:app --only": OPTIONS,
        "ALTER SYSTEM": OTHERS,
    },
    "docs/how-to/durable-test-without-sleeping.md": {
        "[tool.pytest.ini_options]": f"{SHORT}; tests/test_pytest_plugin.py has such a setting",
    },
    "docs/how-to/service-celery.md": {"pip install": OPTIONS},
    "docs/how-to/service-consume.md": {
        "pip install": OPTIONS,
        "tickwheel consume": OPTIONS,
    },
    "docs/how-to/service-dashboard.md": {"$ tickwheel tokens": OPTIONS},
    "docs/how-to/service-deploy.md": {
        "$ cd deploy": OTHERS,
        "$ useradd": OTHERS,
        "store =": SHORT,
        "$ chown": OTHERS,
        "$ as_blue()": f"{OTHERS}; tests/test_deploy.py compares it with the unit",
        "$ docker": OTHERS,
    },
    "docs/how-to/service-grpc.md": {
        "$ tickwheel serve": OPTIONS,
        "$ grpcurl": OTHERS,
    },
    "docs/how-to/service-kafka-nats.md": {
        "pip install": "the test below runs all but its first line"
    },
    "docs/how-to/service-operate.md": {
        "$ pip install": OPTIONS,
        "$ tickwheel doctor": OPTIONS,
        "store =": SHORT,
        "$ tickwheel serve": OPTIONS,
        "$ openssl": OTHERS,
        "$ tickwheel tokens": OPTIONS,
        "$ export": OTHERS,
        "$ for name": OPTIONS,
        "SELECT": OTHERS,
    },
    "docs/how-to/service-receive.md": {
        "from tickwheel.client": f"{SHORT}; the tutorial of the service reports an outcome later",
        "$ tickwheel services": OPTIONS,
    },
    "docs/reference/cli.md": {"$ ": OPTIONS},
}


def blocks(page):
    """Return the code blocks of a page that need a test of their own: kind and text."""
    for kind, text in BLOCK.findall(page.read_text("utf-8")):
        directive = kind.startswith("{") and kind != "{code-block} python"
        if not directive and kind not in RUN_EVERYWHERE | NOT_CODE:
            yield kind, text


WITH_BLOCKS = [page for page in PAGES if any(blocks(page))]


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_every_block_is_run_or_listed_with_the_reason(page):
    name = page.relative_to(ROOT).as_posix()
    left = [" ".join(text.split()) for _, text in blocks(page)]
    for start in NOT_RUN.get(name, {}):
        found = [text for text in left if text.startswith(start)]
        assert len(found) == 1 or (found and name == "docs/reference/cli.md"), (start, found)
        left = [text for text in left if text not in found]
    test, count = RUN.get(name, ("conftest.py", 0))
    assert (ROOT / "tests" / test).is_file()
    assert len(left) == count, left


def commands(page):
    """Return the words after each `tickwheel` that a shell line of a page calls."""
    for kind, text in blocks(page):
        if kind in ("console", "sh"):
            for words in CALL.findall(text.replace("\\\n", " ")):
                yield shlex.split(words, comments=True)


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_every_command_and_option_that_is_shown_exists(page):
    for words in commands(page):
        command, left = root, words
        while isinstance(command, click.Group) and left and not left[0].startswith("-"):
            name, *left = left
            found = command.get_command(click.Context(command), name)
            assert found is not None, words
            command = found
        command.make_parser(click.Context(command)).parse_args(left)


def test_a_server_takes_every_service_that_the_how_to_pages_put(tmp_path):
    shown = [
        words
        for page in PAGES
        if page.parent.name == "how-to"
        for words in commands(page)
        if words[:2] == ["services", "put"] and "--endpoint" in words
    ]
    assert len(shown) == 5
    words = ["--store", f"sqlite:///{tmp_path}/tasks.db", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-m", "tickwheel", "serve", *words, "--allow-private-targets"],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    ) as server:  # fmt: skip
        try:
            url = server.stdout.readline().split()[-1]
            for words in shown:
                ran = CliRunner().invoke(root, [*words, "--server", url])
                assert ran.exit_code == 0, (words, ran.output)
        finally:
            server.terminate()
