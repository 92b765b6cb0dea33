"""A fork while a scheduler runs, and the recipes for servers that fork or reload, as processes."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from servers import wait_until
from stage import program

pytestmark = [
    pytest.mark.usefixtures("watched"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "durable-web-frameworks.md"
SHOP = """
import os
from tickwheel.durable import Scheduler

VERSION = 1
app = Scheduler("sqlite:///shop.db")


@app.task
def expire(order_id):
    with open("log", "a") as log:
        log.write(f"{order_id} {os.getpid()} {VERSION}\\n")
"""


@pytest.mark.parametrize("driver", ["default", "sqlite3"])
def test_a_fork_while_a_scheduler_writes_leaves_both_processes_a_sound_one(tmp_path, driver):
    """Nothing is logged either: `program` wants silence."""
    without = "sys.modules['apsw'] = None" if driver == "sqlite3" else ""
    text = f"""
        import os, sys, threading, time
        {without}
        from tickwheel.durable import Scheduler

        app = Scheduler("sqlite:///{tmp_path}/tasks.db")

        @app.task
        def note(what):
            with open("{tmp_path}/log", "a") as log:
                log.write(what + "\\n")

        with app.blocking() as b:
            def write(first):
                for number in range(first, 60, 4):
                    b.submit(note, f"parent-{{number}}")

            writers = [threading.Thread(target=write, args=(n,)) for n in range(4)]
            for writer in writers:
                writer.start()
            children = []
            for number in range(8):
                if (child := os.fork()) == 0:
                    with app.blocking() as mine:
                        mine.submit(note, f"child-{{number}}")
                    os._exit(0)
                children.append(child)
            for writer in writers:
                writer.join()
            assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
            for _ in range(3000):
                with open("{tmp_path}/log") as log:
                    if len(log.readlines()) >= 68:
                        break
                time.sleep(0.01)
    """
    (tmp_path / "log").touch()
    program(text)
    done = (tmp_path / "log").read_text().split()
    expected = [f"parent-{n}" for n in range(60)] + [f"child-{n}" for n in range(8)]
    assert sorted(done) == sorted(expected)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("driver", ["default", "sqlite3"])
def test_the_child_of_a_fork_inherits_no_open_file_of_the_database(tmp_path, driver):
    """SQLite keeps locks by process: with a connection from before a fork, a file gets damaged."""
    without = "sys.modules['apsw'] = None" if driver == "sqlite3" else ""
    text = f"""
        import os, sys
        {without}
        from tickwheel.durable import Scheduler

        def open_files():
            found = []
            for number in os.listdir("/proc/self/fd"):
                try:
                    found.append(os.readlink(f"/proc/self/fd/{{number}}"))
                except OSError:  # that of the list itself
                    pass
            return [name for name in found if "tasks.db" in name]

        with Scheduler("sqlite:///{tmp_path}/tasks.db", dispatch=False).blocking() as b:
            b.submit("work", 1, delay=60)
            before = len(open_files())
            if (child := os.fork()) == 0:
                print(before > 1, open_files())
                sys.stdout.flush()
                os._exit(0)
            os.waitpid(child, 0)
            b.submit("work", 2, delay=60)
    """
    assert program(text).strip() == "True []"


def recipes():
    """The files of the page, by name; their tasks are due at once."""
    found = re.findall(
        r"^`([\w./]+)`\n\n```py\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return {name: text.replace("delay=1800, ", "") for name, text in found}


class Site:
    """A directory with the files of a recipe, and the server that was started there."""

    def __init__(self, path, *names):
        self.path = path
        files = recipes()
        for name in names:
            (path / name).write_text(files[name])
        (path / "shop.py").write_text(SHOP)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._orders = 0

    @contextlib.contextmanager
    def served(self, *command, stop=signal.SIGINT):
        """Start the server; in the end it must stop well, and have said nothing of errors."""
        with (self.path / "said").open("w") as said:
            self.server = subprocess.Popen(
                [sys.executable, *(word.format(port=self.port) for word in command)],
                cwd=self.path, stdout=said, stderr=said, start_new_session=True,
                env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            )  # fmt: skip
        try:
            wait_until(self.order, "it serves")
            yield
            self.server.send_signal(stop)
            self.server.wait(20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait(20)
        said = (self.path / "said").read_text()
        assert "Traceback" not in said, said
        assert "locked" not in said, said

    def order(self):
        """Submit one task by a request; whether it was stored."""
        if stored := self._post(f"/orders/{self._orders}") is not None:
            self._orders += 1
        return stored

    def _post(self, path):
        """Return the answer to a request, or None if there is none."""
        url = f"http://127.0.0.1:{self.port}{path}"
        with contextlib.suppress(OSError):
            request = urllib.request.Request(url, method="POST")
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)
        return None

    def runs(self):
        """The runs so far: number of the order, process, version of the code."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.path / "log").read_text().splitlines()
            return [tuple(map(int, line.split())) for line in lines]
        return []

    def check_runs(self):
        """Wait until every order has been run once, in no process but those that serve."""
        for _ in range(10):
            assert self.order()
        wait_until(lambda: len(self.runs()) >= self._orders, "all have run")
        assert set(Counter(order for order, _, _ in self.runs()).values()) == {1}
        assert self.server.pid not in {pid for _, pid, _ in self.runs()}
        assert self._post("/orders/0/paid") == {"in_time": False}

    def check_reload(self):
        """Change the code: what is submitted to the new process is run by the new code."""
        time.sleep(1.1)  # a reloader may look at whole seconds
        old = Path(f"/proc/{self.runs()[-1][1]}")
        (self.path / "shop.py").write_text(SHOP.replace("VERSION = 1", "VERSION = 2"))
        # A process that is ending refuses requests, and logs that.
        wait_until(lambda: not old.exists(), "the old process has ended")
        wait_until(lambda: self.order() and self.runs()[-1][2] == 2, "the new code runs")
        first = self._orders
        self.check_runs()
        assert {version for order, _, version in self.runs() if order >= first} == {2}


def test_a_notebook_whose_cell_is_run_again_with_other_code(tmp_path):
    found = re.search(
        r"^`orders.ipynb`\n\n```\{[^\n]*\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    start, define, submit, stop = re.split(r"^# %%.*\n", found[1], flags=re.MULTILINE)
    changed = define.replace("has expired", "is cancelled")
    cells = [
        nbformat.v4.new_code_cell(text)
        for text in (start, define, submit, define, submit, changed, submit, stop)
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    ran = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": tmp_path}}).execute()
    shown = [
        output["data"]["text/plain"]
        for cell in ran.cells
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    assert shown == ["'17 has expired'", "'17 has expired'", "'17 is cancelled'"]
    assert not [cell for cell in ran.cells for one in cell.outputs if one.output_type == "stream"]


@pytest.mark.parametrize("preload", [["--preload"], []], ids=["preload", "no preload"])
def test_gunicorn(tmp_path, preload):
    site = Site(tmp_path, "with_flask.py", "gunicorn.conf.py")
    with site.served(
        "-m", "gunicorn", "-w", "2", "-b", "127.0.0.1:{port}", *preload, "with_flask:web",
        stop=signal.SIGTERM,  # at SIGINT it ends a worker that may still be sending an answer
    ):  # fmt: skip
        site.check_runs()


def test_flask_with_its_reloader(tmp_path):
    site = Site(tmp_path, "with_flask.py")
    with site.served(
        "-m", "flask", "--app", "with_flask:create_app", "run", "--debug", "--port", "{port}"
    ):
        site.check_runs()
        site.check_reload()


def test_uvicorn_with_its_reloader(tmp_path):
    site = Site(tmp_path, "with_fastapi.py")
    with site.served("-m", "uvicorn", "with_fastapi:web", "--reload", "--port", "{port}"):
        site.check_runs()
        site.check_reload()
