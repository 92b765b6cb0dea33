"""The package on Windows and macOS, simulated: in a new process the names are removed first.

asyncio is imported before that, since the standard library may use what its own system has.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from stage import LONG
from tickwheel.cli import exit_codes

MACOS = """
    import asyncio, ctypes, logging.config, multiprocessing, os, select, signal, socket, sqlite3
    import concurrent.futures, selectors, ssl, subprocess, sys, tempfile, time, uuid

    def remove(module, *prefixes):
        for name in [name for name in vars(module) if name.startswith(prefixes)]:
            delattr(module, name)

    remove(time, "CLOCK_BOOTTIME")
    remove(os, "sched_", "posix_fadvise", "eventfd", "memfd", "pipe2")
    os.process_cpu_count = os.cpu_count  # from Python 3.13 on, where there is no sched_getaffinity
"""
WINDOWS = """
    pair, family = socket.socketpair, socket.AF_UNIX
    socket.socketpair = lambda: pair(family)  # the event loops use it on every system
    selectors.DefaultSelector = selectors.SelectSelector
    for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty", "uvloop"):
        sys.modules[name] = None
    remove(time, "CLOCK_", "clock_gettime", "clock_getres")
    remove(os, "fork", "register_at_fork", "getuid", "geteuid", "getgid", "O_CLOEXEC", "O_NOFOLLOW",
           "fchmod", "fchown", "chown", "killpg", "setsid", "wait", "WNOHANG", "uname", "sysconf")
    remove(signal, "pthread_", "sigwait", "sigpending", "SIGHUP", "SIGKILL", "SIGUSR",
           "SIGCHLD", "SIGALRM")
    remove(select, "poll", "epoll", "POLL", "EPOLL")
    remove(socket, "AF_UNIX", "SO_REUSEPORT", "send_fds", "recv_fds", "SCM_")
"""
SYSTEMS = {"macos": MACOS, "windows": MACOS + WINDOWS}


def run_on(system, code, *arguments, **environment):
    """Return the ended process that ran `code` where the names that `system` lacks are removed."""
    return subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(SYSTEMS[system]) + textwrap.dedent(code),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=LONG * 2,
        env={**os.environ, **environment},
        check=False,
    )


def prints(system, code, *arguments, **environment):
    ended = run_on(system, code, *arguments, **environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


@pytest.mark.parametrize(("system", "pure"), [("macos", "0"), ("windows", "1")])
def test_wheels_timers_purgatories_and_the_idle_tracker_work(system, pure):
    code = """
        import threading
        import tickwheel
        from tickwheel.clock import BootClock

        wheel = tickwheel.Wheel()
        wheel.schedule(70, "wheel")
        print(*wheel.advance(70))

        rang = threading.Event()
        with tickwheel.Timer() as timer:
            timer.call_later(0.002, rang.set)
            assert rang.wait(30)
            print("timer")
            quiet = threading.Event()
            tracker = tickwheel.IdleTracker(0.01, lambda keys: quiet.set(), timer=timer)
            tracker.touch("key")
            assert quiet.wait(30)
            print("idle")

        class Waits(tickwheel.DelayedOperation):
            expired = threading.Event()

            def try_complete(self):
                return False

            def on_complete(self):
                pass

            def on_expiration(self):
                self.expired.set()

        with tickwheel.Purgatory("test") as purgatory:
            purgatory.try_complete_else_watch(Waits(0.01), ["key"])
            assert Waits.expired.wait(30)
            print("purgatory")

        async def main():
            fired = asyncio.Event()
            async with tickwheel.AsyncTimer() as timer:
                timer.call_later(0.002, fired.set)
                await asyncio.wait_for(fired.wait(), 30)
            print("async")

        asyncio.run(main())
        with asyncio.Runner(loop_factory=tickwheel.new_event_loop) as runner:
            print(runner.run(asyncio.sleep(0.001, "loop")))

        clock = BootClock()
        before = clock.time_ns()
        assert 0 < before <= clock.time_ns()
    """
    expected = ["wheel", "timer", "idle", "purgatory", "async", "loop"]
    assert prints(system, code, TICKWHEEL_PURE=pure) == expected


@pytest.mark.parametrize(("system", "folder"), [("macos", "short"), ("windows", "long" * 30)])
def test_durable_tasks_run_on_sqlite(tmp_path, system, folder):
    code = """
        from tickwheel.durable import Scheduler

        app = Scheduler("sqlite:///" + sys.argv[1])

        @app.task
        def double(number):
            return 2 * number

        with app.blocking() as b:
            print(b.wait(b.submit("double", [21]).id, timeout=30).result)
    """
    (tmp_path / folder).mkdir()
    ended = run_on(system, code, str(tmp_path / folder / "tasks.db"))
    assert ended.stdout.split() == ["42"], ended.stderr
    warned = "this system has no file locks: let only one process dispatch from" in ended.stderr
    assert warned == (system == "windows")


def test_the_command_line_loads_there():
    code = "import runpy; sys.argv = ['tickwheel', 'serve', '--help']; "
    code += "runpy.run_module('tickwheel', run_name='__main__')"
    assert "--store" in prints("windows", code)


def test_the_service_says_where_it_runs(tmp_path):
    code = "import runpy; sys.argv = ['tickwheel', 'serve', '--store', 'sqlite:///tasks.db']; "
    code += f"os.chdir({str(tmp_path)!r}); runpy.run_module('tickwheel', run_name='__main__')"
    ended = run_on("windows", code)
    assert ended.returncode != 0
    assert "the service runs on Linux and macOS" in ended.stderr, ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_worker_says_where_it_runs(tmp_path):
    (tmp_path / "shop.py").write_text("raise AssertionError('it is not even imported')")
    code = "import runpy; sys.argv = ['tickwheel', 'worker', 'shop:app', *sys.argv[1:]]; "
    code += f"os.chdir({str(tmp_path)!r}); runpy.run_module('tickwheel', run_name='__main__')"
    for options in ([], ["--processes", "2"], ["--reload"]):
        ended = run_on("windows", code, *options)
        assert ended.returncode == exit_codes.USAGE, ended.stderr
        assert "a worker runs on Linux and macOS" in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr


def test_the_native_core_is_not_attempted_on_windows():
    code = """
        import sys
        import setuptools.command.build_ext
        setuptools.setup = lambda **given: print(given["ext_modules"])
        sys.platform = "win32"
        exec(open("setup.py").read())
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=LONG, check=True,
        cwd=Path(__file__).parent.parent, env={**os.environ, "TICKWHEEL_PURE": ""},
    )  # fmt: skip
    assert ran.stdout.split() == ["[]"]
