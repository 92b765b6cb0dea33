"""The tutorial of the service, typed in: every file, every command, and what each of them shows."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "tutorials" / "service.md").read_text("utf-8")
FILES = dict(re.findall(r"^`(\w+\.py)`\n\n```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
BLOCKS = re.findall(r"^```(console|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
INSTALL = ("python3 -m venv", "pip install", "cd ~/shop")  # done already, by whoever runs the tests
LOOKS = re.compile(r"tickwheel (list|show)|curl -s -X POST")  # may be done again
KILL = "kill -9 $(cat server.pid)"
SECONDS = 25
END = "--end of command--"


def steps():
    """Give each command and what is shown below it, and each text that the shop is to print."""
    for kind, block in BLOCKS:
        if kind == "text":
            yield None, block.splitlines()
            continue
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            if not command.startswith(INSTALL):
                yield command, shown.splitlines()


def matches(shown, printed):
    """Return whether the output matches; … matches anything, and on its own line any lines."""
    pattern = ""
    for line in shown:
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += r"\s+".join(re.escape(word) for word in line.split()) + r"\s*\n"
    pattern = pattern.replace("…", ".*")
    return re.fullmatch(pattern, "".join(f"{line.strip()}\n" for line in printed))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Terminals:
    """Three of them: the server's, the shop's, and the one in which commands are typed."""

    def __init__(self, folder, python=sys.executable):
        self.folder = folder
        self.ports = {"7380": free_port(), "8000": free_port()}
        bin_folder = str(Path(python).parent)
        self.environ = {
            name: value for name, value in os.environ.items() if not name.startswith("TICKWHEEL_")
        } | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "120",
            "NO_PROXY": "*",
            "TICKWHEEL_LISTEN": f"127.0.0.1:{self.ports['7380']}",
            "TICKWHEEL_SERVER": f"http://127.0.0.1:{self.ports['7380']}",
        }
        self.background = {}
        self.shop = []
        self.shell = self.start("exec bash", stdin=subprocess.PIPE, stderr=subprocess.STDOUT)

    def start(self, command, **options):
        return subprocess.Popen(
            ["bash", "-c", command], cwd=self.folder, env=self.environ, text=True,
            stdout=subprocess.PIPE, **options,
        )  # fmt: skip

    def real(self, command):
        for shown, port in self.ports.items():
            command = command.replace(f":{shown}/", f":{port}/").replace(
                f"--port {shown}", f"--port {port}"
            )
        if re.match(r"tickwheel (services|submit|cancel|list|show|feedback) ", f"{command} ") and (
            "--quiet" not in command
        ):
            command += " --table"  # as on a terminal
        return command

    def serve(self, name, command):
        """Start a server, in place of the one before."""
        self.stop(name)
        program = re.sub(r"(sh|tickwheel|uvicorn) ", r"exec \1 ", self.real(command), count=1)
        process = self.start(program, stderr=subprocess.DEVNULL)
        self.background[name] = process
        if name == "server":
            return [process.stdout.readline()]
        threading.Thread(target=self.read, args=(process.stdout,), daemon=True).start()
        until(lambda: listens(int(self.ports["8000"])))
        return []

    def read(self, lines):
        with lines:
            self.shop.extend(lines)

    def stop(self, name):
        process = self.background.pop(name, None)
        if process is not None:
            process.send_signal(signal.SIGINT)
            process.wait(SECONDS)
            if name == "server":
                process.stdout.close()

    def run(self, command):
        self.shell.stdin.write(f"{self.real(command)}\necho; echo '{END}'\n")
        self.shell.stdin.flush()
        lines = []
        while (line := self.shell.stdout.readline()) != f"{END}\n":
            assert line, f"the shell has ended: {command}"
            lines.append(line)
        return lines[:-1] if lines[-1:] == ["\n"] else lines

    def close(self):
        for name in list(self.background):
            self.stop(name)
        self.shell.stdin.close()
        self.shell.wait(SECONDS)
        self.shell.stdout.close()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def terminals(tmp_path):
    made = Terminals(tmp_path)
    watchdog = threading.Timer(120, made.shell.kill)  # then what is read of it ends
    watchdog.start()
    yield made
    watchdog.cancel()
    made.close()


def follow(terminals):
    """Type in the tutorial, and compare all that it shows."""
    for name, code in FILES.items():
        (terminals.folder / name).write_text(code, "utf-8")
    compared = 0
    for command, shown in steps():
        if command is None:
            until(lambda: len(terminals.shop) >= compared + len(shown))  # noqa: B023
            assert [line.rstrip("\n") for line in terminals.shop[compared:]] == shown
            compared += len(shown)
        elif "tickwheel serve " in command:
            printed = terminals.serve("server", command)
            expected = [line.replace("7380", terminals.ports["7380"]) for line in shown]
            assert matches(expected, printed), (command, printed)
        elif "uvicorn" in command:
            terminals.serve("shop", command)
        elif command == KILL:
            terminals.run(command)
            assert terminals.background["server"].wait(SECONDS) == -signal.SIGKILL
        else:
            assert look(terminals, command, [terminals.real(line) for line in shown])


def test_the_tutorial_does_what_it_says(terminals):
    follow(terminals)


def look(terminals, command, shown):
    """Do a command; what only looks is done until it shows what it should."""
    end = time.monotonic() + (20 if LOOKS.match(command) else 0)
    while not (found := matches(shown, printed := terminals.run(command))):
        if time.monotonic() >= end:
            pytest.fail(f"{command}\nis to show\n{shown}\nand showed\n{printed}")
    return found


def test_every_file_of_it_is_used():
    commands = " ".join(command or "" for command, _ in steps())
    for name in FILES:
        assert name in commands or f"{name.removesuffix('.py')}:app" in commands
