"""The metrics of several workers, told by one: what is asked, left out, and merged."""

import asyncio
import contextlib
import socket
import stat
import tempfile
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tickwheel.web import siblings as module
from tickwheel.web.metrics import Family, exposition, families_of, merged
from tickwheel.web.siblings import Siblings, meeting_place
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
    """A machine that is busy leaves nobody out; who is silent for ever says so in its test."""
    monkeypatch.setattr(module, "SECONDS", PATIENCE)


@pytest.fixture
def directory():
    with meeting_place() as made:
        yield Path(made)


def told(number, count=1):
    """What a worker tells: one family, and one of the store, which is not for others."""
    return [
        Family("counter", "sent", "Sent.", [f'sent{{worker="{number}"}} {count}']),
        Family("gauge", "tasks", "Tasks.", ["tasks 7"], shared=True),
    ]


class Crew:
    """Some workers on one loop; each tells what `told` gives it, or what it is given."""

    def __init__(self, directory, numbers, workers=3, own=None):
        self.asked = []
        self.siblings = [
            Siblings(number, workers, str(directory), self._own(number, own)) for number in numbers
        ]

    def _own(self, number, own):
        def tell(within):
            self.asked.append((number, within))
            return own(within, number) if own else told(number)

        return tell

    async def __aenter__(self):
        for one in self.siblings:
            await one.open()
        return self.siblings

    async def __aexit__(self, *_):
        for one in self.siblings:
            one.close()


def asked(directory, numbers, within=None, workers=3):
    """What the first of these workers hears from the others."""

    async def ask():
        async with Crew(directory, numbers, workers) as crew:
            return await crew[0].ask(within)

    return asyncio.run(ask())


@contextlib.contextmanager
def listening(directory, number):
    """Somebody who has a worker's socket, and is not a worker."""
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(directory / str(number)))
        one.listen()
        yield one


class TestAsk:
    def test_each_sibling_tells_what_is_its_own(self, directory):
        heard = asked(directory, [1, 0, 2])
        assert heard == {number: told(number)[:1] for number in (0, 2)}

    @pytest.mark.parametrize("within", [None, "", "acme", 'a"\n\\'])
    def test_they_are_asked_for_the_same_namespace(self, directory, within):
        async def ask():
            crew = Crew(directory, range(3))
            async with crew as siblings:
                await siblings[0].ask(within)
            return sorted(crew.asked)

        assert asyncio.run(ask()) == [(1, within), (2, within)]

    def test_who_is_not_there_is_left_out(self, directory):
        assert asked(directory, [0]) == {}
        assert asked(directory, [0, 2]).keys() == {2}

    def test_one_alone_asks_nobody(self, directory):
        assert asked(directory, [0], workers=1) == {}

    def test_who_is_silent_is_left_out(self, directory, monkeypatch):
        monkeypatch.setattr(module, "SECONDS", 0.05)
        with listening(directory, 1):
            assert asked(directory, [0]) == {}

    def test_whose_queue_is_full_is_left_out(self, directory, monkeypatch):
        monkeypatch.setattr(module, "SECONDS", 0.05)
        with listening(directory, 1) as full, contextlib.ExitStack() as callers:
            full.listen(0)
            for _ in range(5):
                caller = callers.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    caller.connect(str(directory / "1"))
            assert asked(directory, [0]) == {}

    @pytest.mark.parametrize(
        "text", [b"", b"nonsense", b"{}", b"[1]", msgspec.json.encode(told(1))[:-5]]
    )
    def test_half_an_answer_is_none(self, directory, text):
        async def reply(reader, writer):
            await reader.readline()
            writer.write(text)
            writer.close()

        async def ask():
            path = directory / "1"
            server = await asyncio.start_unix_server(reply, path)
            async with server, Crew(directory, [0, 2]) as crew:
                return await crew[0].ask(None)

        assert asyncio.run(ask()).keys() == {2}

    def test_a_long_answer_comes_whole(self, directory):
        lines = [f"sent{{n={n}}} 1" for n in range(50_000)]

        def many(*_):
            return [Family("counter", "sent", "Sent.", lines)]

        async def ask():
            async with Crew(directory, [0, 1], own=many) as crew:
                return await crew[0].ask(None)

        assert asyncio.run(ask())[1] == many()


class TestAnswer:
    @pytest.mark.parametrize("question", [b"", b"\n", b"what?\n", b"[1]\n", b"x" * 200_000])
    def test_what_is_no_question_is_hung_up_on_and_the_next_answered(
        self, directory, question, caplog
    ):
        async def ask():
            async with Crew(directory, [0, 1]) as crew:
                reader, writer = await asyncio.open_unix_connection(directory / "1")
                with contextlib.suppress(ConnectionError):
                    writer.write(question)
                    writer.write_eof()
                    assert await reader.read() == b""
                writer.close()
                return await crew[0].ask(None)

        assert asyncio.run(ask()).keys() == {1}
        assert caplog.records == []

    def test_who_leaves_before_the_answer_harms_nobody(self, directory):
        async def ask():
            async with Crew(directory, [0, 1]) as crew:
                for _ in range(20):
                    _, writer = await asyncio.open_unix_connection(directory / "1")
                    writer.write(b"null\n")
                    writer.transport.abort()
                return await crew[0].ask(None)

        assert asyncio.run(ask()).keys() == {1}


class TestPlace:
    def test_nobody_else_can_enter_and_nothing_is_left(self):
        with meeting_place() as made:
            path = Path(made)
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            (path / "0").touch()
        assert not path.exists()

    def test_the_last_socket_has_a_name_that_is_short_enough(self, directory):
        asked(directory, [255], workers=256)

    def test_a_directory_that_cannot_be_made_is_said(self, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
        with pytest.raises(OSError, match=r"/proc/nowhere/tw-.* Set TMPDIR"), meeting_place():
            pass

    def test_a_name_that_is_too_long_is_said_and_not_left(self, monkeypatch, tmp_path):
        parent = tmp_path / ("x" * 100)
        parent.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        with pytest.raises(OSError, match=r"too long a name .* Set TMPDIR"), meeting_place():
            pass
        assert list(parent.iterdir()) == []

    def test_a_socket_that_was_left_is_replaced(self, directory):
        with listening(directory, 1):
            pass
        assert (directory / "1").is_socket()
        assert asked(directory, [0, 1]).keys() == {1}

    def test_a_socket_leaves_with_its_worker_and_the_directory_with_the_last(self, directory):
        async def leave():
            async with Crew(directory, [0, 1]) as crew:
                assert {path.name for path in directory.iterdir()} == {"0", "1"}
                crew[0].close()
                assert {path.name for path in directory.iterdir()} == {"1"}
                crew[1].close(last=True)
                assert not directory.exists()

        asyncio.run(leave())

    def test_a_worker_that_cannot_listen_is_left_out_and_says_so(self, caplog):
        async def ask():
            async with Crew("/proc/nowhere", [0]) as crew:
                return await crew[0].ask(None)

        assert asyncio.run(ask()) == {}
        assert "worker 0 is left out of metrics: /proc/nowhere/0" in caplog.text


class TestMerged:
    def test_heads_come_once_and_samples_by_worker_whoever_was_asked(self):
        pages = {number: told(number)[:1] for number in range(3)}
        for asked in range(3):
            text = exposition(merged(told(asked), {**pages, asked: told(asked)}, 3))
            assert text.splitlines() == [
                "# HELP sent Sent.", "# TYPE sent counter",
                'sent{worker="0"} 1', 'sent{worker="1"} 1', 'sent{worker="2"} 1',
                "# HELP tasks Tasks.", "# TYPE tasks gauge", "tasks 7",
                "# HELP tickwheel_worker_up Whether the worker's samples are among these.",
                "# TYPE tickwheel_worker_up gauge",
                'tickwheel_worker_up{worker="0"} 1', 'tickwheel_worker_up{worker="1"} 1',
                'tickwheel_worker_up{worker="2"} 1',
            ]  # fmt: skip

    def test_who_did_not_tell_is_seen(self):
        found = merged(told(1), {1: told(1)}, 3)
        assert [line[-1] for line in found[-1].lines] == ["0", "1", "0"]

    def test_what_only_another_version_has_comes_last(self):
        new = Family("gauge", "new", "New.", ['new{worker="0"} 1'])
        found = merged(told(1), {0: [new, *told(0)[:1]], 1: told(1)}, 2)
        assert [one.name for one in found] == ["sent", "tasks", "new", "tickwheel_worker_up"]
        assert found[0].lines == told(0)[0].lines + told(1)[0].lines
        assert found[2].lines == new.lines

    def test_what_was_told_is_left_as_it_was(self):
        own, other = told(0), told(1)
        merged(own, {0: own, 1: other[:1]}, 2)
        assert (own, other) == (told(0), told(1))


class TestScrape:
    """The route, asked on each of three workers, which all tell what one application counts."""

    @pytest.fixture
    def crew(self, api, directory, receiver):
        api.service("good", endpoint=receiver.url("/ok"))
        api.task_in(api.submit("good", delay=0)["id"], "finished")
        crew = Crew(directory, range(3), own=lambda *how: families_of(api.app, None, *how))
        api.run(crew.__aenter__())
        yield crew.siblings
        api.run(crew.__aexit__())

    def test_any_of_them_tells_all(self, api, crew):
        scraped(api)  # the first one counts itself afterwards, as a series of its own
        seen = []
        for one in crew:
            api.app.siblings = one
            text = api.get("/metrics", status=200).body.decode()
            lines = text.splitlines()
            seen.append([line.rpartition(" ")[0] for line in lines])
            series = [line for line in seen[-1] if not line.startswith("#")]
            assert len(series) == len(set(series))
            heads = [line for line in lines if line.startswith("#")]
            assert len(heads) == len(set(heads))
            check_grouped(lines)
        assert seen[0] == seen[1] == seen[2]

    def test_what_is_a_worker_s_says_whose_and_what_is_the_store_s_comes_once(self, api, crew):
        scraped(api)
        api.app.siblings = crew[1]
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

    def test_one_that_is_gone_leaves_the_others(self, api, crew):
        crew[2].close()
        api.app.siblings = crew[0]
        families = scraped(api)
        up = {s.labels["worker"]: s.value for s in families["tickwheel_worker_up"].samples}
        assert up == {"0": 1, "1": 1, "2": 0}
        assert {s.labels["worker"] for s in families["tickwheel_sent"].samples} == {"0", "1"}

    def test_alone_there_is_no_such_label(self, api):
        assert b"worker" not in api.get("/metrics", status=200).body


def check_grouped(lines):
    """All samples of a family stand together, after its head."""
    text = "\n".join(lines) + "\n"
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names))
