"""The servers that other tests stand on: up, down, dead, standing still, and never left behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import servers
from servers import PostgresServer, RedisServer

HERE = str(Path(__file__).parent)


def write(server):
    if isinstance(server, RedisServer):
        server.execute("INCR", "written")
    else:
        server.execute("CREATE TABLE IF NOT EXISTS written (); INSERT INTO written DEFAULT VALUES")


def written(server):
    if isinstance(server, RedisServer):
        return int(server.execute("GET", "written").split("\r\n")[1])
    return int(server.execute("SELECT count(*) FROM written"))


@pytest.fixture(params=[PostgresServer, RedisServer], ids=["postgres", "redis"])
def kind(request):
    return request.param


@pytest.fixture
def server(kind):
    with kind() as server:
        yield server


class TestAServer:
    def test_it_keeps_its_data_and_its_port_through_every_end(self, server):
        port = server.port
        write(server)
        server.restart()
        write(server)
        server.kill()
        assert not server.running
        assert server.pid is None
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            pass
        server.start()
        assert (written(server), server.port) == (2, port)

    def test_starting_and_stopping_twice_is_once(self, server):
        pid = server.pid
        server.start()
        assert server.pid == pid
        server.stop()
        server.stop()
        server.kill()
        server.start()

    def test_paused_it_takes_connections_and_does_not_answer(self, server):
        write(server)
        server.pause()
        answers = []
        asking = threading.Thread(target=lambda: answers.append(written(server)))
        asking.start()
        family = [server.pid, *servers._descendants(server.pid)]
        assert {servers._stat(pid)[0] for pid in family} <= {"T", "Z"}
        assert answers == []
        server.resume()
        asking.join(60)
        assert answers == [1]

    def test_paused_it_can_be_killed_or_stopped(self, server):
        server.pause()
        server.kill()
        server.start()
        server.pause()
        server.stop()
        assert not server.running

    def test_closed_it_leaves_nothing(self, kind):
        with kind() as server:
            family = [server.pid, *servers._descendants(server.pid)]
            assert server.directory.exists()
        assert not server.directory.exists()
        assert all(map(servers._gone, family))

    def test_started_by_a_thread_it_outlives_the_thread(self, kind):
        server = kind()
        try:
            thread = threading.Thread(target=server.start)
            thread.start()
            thread.join(60)
            write(server)
            assert written(server) == 1
        finally:
            server.close()

    def test_it_dies_with_the_process_that_started_it(self, kind):
        text = f"""
import sys, time
sys.path.insert(0, {HERE!r})
import servers
server = servers.{kind.__name__}().start()
print(server.directory, server.pid, *servers._descendants(server.pid), flush=True)
time.sleep(600)
"""
        with subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True
        ) as owner:
            directory, *family = owner.stdout.readline().split()
            owner.kill()
        servers.wait_until(lambda: all(map(servers._gone, family)), "the server is gone")
        servers.shutil.rmtree(directory)

    def test_a_taken_port_is_given_up_for_another(self, kind, monkeypatch):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            ports = iter([port, servers.free_port()])
            monkeypatch.setattr(servers, "free_port", lambda: next(ports))
            with kind() as server:
                assert server.port != port
                write(server)

    def test_what_does_not_start_says_why(self, kind, monkeypatch):
        monkeypatch.setattr(servers, "TRIES", 1)
        server = kind(options={"no_such_setting": "1"})
        with pytest.raises(RuntimeError, match=r"no_such_setting|no-such-setting"):
            server.start()
        server.close()

    def test_one_that_is_not_installed_is_a_failure_with_the_package_to_install(
        self, kind, monkeypatch
    ):
        monkeypatch.setattr(servers.shutil, "which", lambda name: None)
        monkeypatch.setattr(servers.Path, "glob", lambda self, pattern: iter(()))
        with pytest.raises(pytest.fail.Exception, match=f"apt-get install {kind.package}"):
            kind()

    def test_it_does_not_see_what_is_meant_for_this_python(self, server):
        seen = Path(f"/proc/{server.pid}/environ").read_bytes()
        assert b"LD_PRELOAD" not in seen
        assert b"PYTHON" not in seen

    def test_durable_ones_wait_for_the_disk(self, kind):
        with kind(durable=True) as server:
            if kind is RedisServer:
                assert "always" in server.execute("CONFIG", "GET", "appendfsync")
            else:
                assert server.execute("SHOW fsync") == "on"


class TestTheTemplateOfPostgres:
    @pytest.fixture
    def elsewhere(self, monkeypatch):
        """A temporary directory without a template."""
        place = Path(servers.tempfile.mkdtemp(prefix="tickwheel-elsewhere-"))
        place.chmod(0o755)
        monkeypatch.setattr(servers.tempfile, "tempdir", str(place))
        yield place
        servers.shutil.rmtree(place)

    @pytest.fixture
    def quick_initdb(self, postgres_server, monkeypatch):
        """Copies the usual template instead: initdb takes seconds."""
        template = postgres_server._template()
        monkeypatch.setattr(
            PostgresServer, "_initdb", lambda self, data: self._copied(template, data)
        )

    def test_it_is_made_once(self, elsewhere, monkeypatch):
        with PostgresServer():
            pass
        (template,) = elsewhere.iterdir()
        monkeypatch.setattr(PostgresServer, "_initdb", None)
        with PostgresServer() as server:
            assert server.execute("SELECT 1") == "1"
        assert list(elsewhere.iterdir()) == [template]

    def test_many_may_make_it_at_once(self, quick_initdb, elsewhere):
        made = [PostgresServer() for _ in range(3)]
        threads = [threading.Thread(target=server.start) for server in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        try:
            assert [server.execute("SELECT 1") for server in made] == ["1"] * 3
        finally:
            for server in made:
                server.close()
        assert len(list(elsewhere.iterdir())) == 1

    def test_a_damaged_one_is_made_anew(self, quick_initdb, elsewhere):
        with PostgresServer():
            pass
        (template,) = elsewhere.iterdir()
        (template / "global" / "pg_control").unlink()
        for _ in range(2):
            with PostgresServer() as server:
                assert server.execute("SELECT 1") == "1"
        assert (template / "global" / "pg_control").exists()

    @pytest.mark.skipif(not servers.ROOT, reason="only root can make what belongs to another")
    def test_one_of_another_user_is_not_trusted(self, quick_initdb, elsewhere):
        with PostgresServer():
            pass
        (template,) = elsewhere.iterdir()
        os.chown(template, 65534, 65534)
        with PostgresServer() as server:
            assert server.execute("SELECT 1") == "1"


def test_a_failing_statement_is_an_error_with_the_reason(postgres_server):
    with pytest.raises(RuntimeError, match="nowhere"):
        postgres_server.execute("SELECT * FROM nowhere")


def test_each_test_has_a_database_of_its_own(postgres_server, postgres_url):
    name = postgres_url.rpartition("/")[2]
    assert postgres_server.execute("SELECT current_database()", name) == name
    assert postgres_server.execute("SELECT count(*) FROM pg_stat_user_tables", name) == "0"


def test_signals_are_for_the_server_alone(server):
    assert os.getsid(server.pid) != os.getsid(0)
    os.kill(server.pid, signal.SIGCONT)
