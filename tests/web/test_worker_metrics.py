"""The metrics of several workers, shown by one: requests, omissions and merging."""

import asyncio
import contextlib
import socket
import stat
import tempfile
from functools import partial
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tickwheel.durable.exposition import Family, exposition
from tickwheel.web import worker_metrics
from tickwheel.web.metrics import app_families, merge_families
from tickwheel.web.worker_metrics import WorkerMetrics, socket_directory
from web.serving import PATIENCE
from web.test_metrics import FAMILIES, scraped, value

SHARED = {
    "tickwheel_tasks",
    "tickwheel_store_up",
    "tickwheel_nodes",
    "tickwheel_sqlite_log_bytes",
}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Sets a long timeout, for busy machines; a test with a silent worker sets its own."""
    monkeypatch.setattr(worker_metrics, "TIMEOUT_SECONDS", PATIENCE)


@pytest.fixture
def directory():
    with socket_directory() as made:
        yield Path(made)


def families(number, count=1):
    """Return the families of a worker: one of its own, and one of the store, which stays."""
    return [
        Family("counter", "sent", "Sent.", [f'sent{{worker="{number}"}} {count}']),
        Family("gauge", "tasks", "Tasks.", ["tasks 7"], shared=True),
    ]


class Crew:
    """Some workers on one loop; each has the families of `families`, or those of `own`."""

    def __init__(self, directory, numbers, workers=3, own=None):
        self.asked = []
        self.workers = [
            WorkerMetrics(number, workers, str(directory), self._own(number, own))
            for number in numbers
        ]

    def _own(self, number, own):
        async def tell(within, counts):
            self.asked.append((number, within))
            return await own(counts, within, number) if own else families(number)

        return tell

    async def __aenter__(self):
        for one in self.workers:
            await one.open()
        return self.workers

    async def __aexit__(self, *_):
        for one in self.workers:
            one.close()


def collected(directory, numbers, within=None, workers=3):
    """Return what the first of these workers collects from the others."""

    async def collect():
        async with Crew(directory, numbers, workers) as crew:
            return await crew[0].collect(within)

    return asyncio.run(collect())


@contextlib.contextmanager
def listening(directory, number):
    """A server on a worker's socket that is not a worker."""
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(directory / str(number)))
        one.listen()
        yield one


class TestCollect:
    def test_each_worker_returns_its_own_families(self, directory):
        found = collected(directory, [1, 0, 2])
        assert found == {number: families(number)[:1] for number in (0, 2)}

    @pytest.mark.parametrize("within", [None, "", 'a"\n\\'])
    def test_the_namespace_is_passed_on(self, directory, within):
        async def collect():
            crew = Crew(directory, range(3))
            async with crew as workers:
                await workers[0].collect(within)
            return sorted(crew.asked)

        assert asyncio.run(collect()) == [(1, within), (2, within)]

    def test_a_missing_worker_is_omitted(self, directory):
        assert collected(directory, [0]) == {}
        assert collected(directory, [0, 2]).keys() == {2}

    def test_a_single_worker_requests_nothing(self, directory):
        assert collected(directory, [0], workers=1) == {}

    def test_a_silent_worker_is_omitted(self, directory, monkeypatch):
        monkeypatch.setattr(worker_metrics, "TIMEOUT_SECONDS", 0.05)
        with listening(directory, 1):
            assert collected(directory, [0]) == {}

    def test_a_worker_with_a_full_backlog_is_omitted(self, directory, monkeypatch):
        monkeypatch.setattr(worker_metrics, "TIMEOUT_SECONDS", 0.05)
        with listening(directory, 1) as full, contextlib.ExitStack() as callers:
            full.listen(0)
            for _ in range(5):
                caller = callers.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    caller.connect(str(directory / "1"))
            assert collected(directory, [0]) == {}

    @pytest.mark.parametrize(
        "text", [b"", b"nonsense", b"{}", b"[1]", msgspec.json.encode(families(1))[:-5]]
    )
    def test_a_truncated_answer_is_ignored(self, directory, text):
        async def reply(reader, writer):
            await reader.readline()
            writer.write(text)
            writer.close()

        async def collect():
            path = directory / "1"
            server = await asyncio.start_unix_server(reply, path)
            async with server, Crew(directory, [0, 2]) as crew:
                return await crew[0].collect(None)

        assert asyncio.run(collect()).keys() == {2}

    def test_a_long_answer_is_complete(self, directory):
        lines = [f"sent{{n={n}}} 1" for n in range(50_000)]
        long = [Family("counter", "sent", "Sent.", lines)]

        async def many(*_):
            return long

        async def collect():
            async with Crew(directory, [0, 1], own=many) as crew:
                return await crew[0].collect(None)

        assert asyncio.run(collect())[1] == long


class TestRespond:
    @pytest.mark.parametrize("question", [b"", b"\n", b"what?\n", b"[1]\n", b"x" * 200_000])
    def test_an_invalid_request_is_closed_and_the_next_answered(self, directory, question, caplog):
        async def collect():
            async with Crew(directory, [0, 1]) as crew:
                reader, writer = await asyncio.open_unix_connection(directory / "1")
                with contextlib.suppress(ConnectionError):
                    writer.write(question)
                    writer.write_eof()
                    assert await reader.read() == b""
                writer.close()
                return await crew[0].collect(None)

        assert asyncio.run(collect()).keys() == {1}
        assert caplog.records == []

    def test_a_caller_that_disconnects_early_breaks_nothing(self, directory):
        async def collect():
            async with Crew(directory, [0, 1]) as crew:
                for _ in range(20):
                    _, writer = await asyncio.open_unix_connection(directory / "1")
                    writer.write(b"null\n")
                    writer.transport.abort()
                return await crew[0].collect(None)

        assert asyncio.run(collect()).keys() == {1}


class TestSocketDirectory:
    def test_it_is_private_and_removed(self):
        with socket_directory() as made:
            path = Path(made)
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            (path / "0").touch()
        assert not path.exists()

    def test_the_path_of_the_last_socket_is_short_enough(self, directory):
        collected(directory, [255], workers=256)

    def test_a_directory_that_cannot_be_created_is_reported(self, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
        with pytest.raises(OSError, match=r"/proc/nowhere/tw-.* Set TMPDIR"), socket_directory():
            pass

    def test_a_path_that_is_too_long_is_reported_and_removed(self, monkeypatch, tmp_path):
        parent = tmp_path / ("x" * 100)
        parent.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        with (
            pytest.raises(OSError, match=r"too long for the paths .* Set TMPDIR"),
            socket_directory(),
        ):
            pass
        assert list(parent.iterdir()) == []

    def test_a_stale_socket_is_replaced(self, directory):
        with listening(directory, 1):
            pass
        assert (directory / "1").is_socket()
        assert collected(directory, [0, 1]).keys() == {1}

    def test_a_socket_is_removed_with_its_worker_and_the_directory_with_the_last(self, directory):
        async def leave():
            async with Crew(directory, [0, 1]) as crew:
                assert {path.name for path in directory.iterdir()} == {"0", "1"}
                crew[0].close()
                assert {path.name for path in directory.iterdir()} == {"1"}
                crew[1].close(last=True)
                assert not directory.exists()

        asyncio.run(leave())

    def test_a_worker_that_cannot_listen_is_omitted_and_logs_it(self, caplog):
        async def collect():
            async with Crew("/proc/nowhere", [0]) as crew:
                return await crew[0].collect(None)

        assert asyncio.run(collect()) == {}
        assert "worker 0 is left out of metrics: /proc/nowhere/0" in caplog.text


class TestMerge:
    def test_heads_appear_once_with_samples_of_each_worker(self):
        pages = {number: families(number)[:1] for number in range(3)}
        for asked in range(3):
            text = exposition(merge_families(families(asked), {**pages, asked: families(asked)}, 3))
            assert text.splitlines() == [
                "# HELP sent Sent.", "# TYPE sent counter",
                'sent{worker="0"} 1', 'sent{worker="1"} 1', 'sent{worker="2"} 1',
                "# HELP tasks Tasks.", "# TYPE tasks gauge", "tasks 7",
                "# HELP tickwheel_worker_up Whether the worker's samples are among these.",
                "# TYPE tickwheel_worker_up gauge",
                'tickwheel_worker_up{worker="0"} 1', 'tickwheel_worker_up{worker="1"} 1',
                'tickwheel_worker_up{worker="2"} 1',
            ]  # fmt: skip

    def test_a_worker_that_did_not_answer_is_down(self):
        found = merge_families(families(1), {1: families(1)}, 3)
        assert [line[-1] for line in found[-1].lines] == ["0", "1", "0"]

    def test_families_of_another_version_come_last(self):
        new = Family("gauge", "new", "New.", ['new{worker="0"} 1'])
        found = merge_families(families(1), {0: [new, *families(0)[:1]], 1: families(1)}, 2)
        assert [one.name for one in found] == ["sent", "tasks", "new", "tickwheel_worker_up"]
        assert found[0].lines == families(0)[0].lines + families(1)[0].lines
        assert found[2].lines == new.lines

    def test_merging_leaves_its_arguments_unchanged(self):
        own, other = families(0), families(1)
        merge_families(own, {0: own, 1: other[:1]}, 2)
        assert (own, other) == (families(0), families(1))


class TestScrape:
    """The route /metrics on each of three workers, which share one application."""

    @pytest.fixture
    def crew(self, api, directory, receiver):
        api.service("good", endpoint=receiver.url("/ok"))
        api.task_in(api.submit("good", delay=0)["id"], "finished")
        crew = Crew(directory, range(3), own=partial(app_families, api.app))
        api.run(crew.__aenter__())
        yield crew.workers
        api.run(crew.__aexit__())

    def test_any_worker_shows_all(self, api, crew):
        scraped(api)  # the first scrape adds a series for itself afterwards
        seen = []
        for one in crew:
            api.app.worker_metrics = one
            text = api.get("/metrics", status=200).body.decode()
            lines = text.splitlines()
            seen.append([line.rpartition(" ")[0] for line in lines])
            series = [line for line in seen[-1] if not line.startswith("#")]
            assert len(series) == len(set(series))
            heads = [line for line in lines if line.startswith("#")]
            assert len(heads) == len(set(heads))
            check_grouped(lines)
        assert seen[0] == seen[1] == seen[2]

    def test_metrics_of_workers_are_labelled_and_those_of_the_store_appear_once(self, api, crew):
        scraped(api)
        api.app.worker_metrics = crew[1]
        families = scraped(api)
        assert families.keys() == FAMILIES.keys() | {"tickwheel_worker_up"}
        for name, (kind, labels) in FAMILIES.items():
            assert families[name].type == kind
            expected = labels if name in SHARED else labels | {"worker"}
            for sample in families[name].samples:
                assert sample.labels.keys() - {"le"} == expected, name
            if name not in SHARED:
                workers = {sample.labels["worker"] for sample in families[name].samples}
                assert workers == {"0", "1", "2"}, name
        assert value(families, "tickwheel_store_up") == 1
        assert value(families, "tickwheel_tasks", state="final") == 1
        assert value(families, "tickwheel_sent", worker="2") == 1

    def test_a_worker_that_is_gone_leaves_the_others(self, api, crew):
        crew[2].close()
        api.app.worker_metrics = crew[0]
        families = scraped(api)
        up = {s.labels["worker"]: s.value for s in families["tickwheel_worker_up"].samples}
        assert up == {"0": 1, "1": 1, "2": 0}
        assert {s.labels["worker"] for s in families["tickwheel_sent"].samples} == {"0", "1"}

    def test_a_single_process_has_no_worker_label(self, api):
        assert b"worker" not in api.get("/metrics", status=200).body


def check_grouped(lines):
    """Check that the samples of each family are contiguous, after its head."""
    text = "\n".join(lines) + "\n"
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names))
