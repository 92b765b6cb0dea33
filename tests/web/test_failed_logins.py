"""Failed log-ins are recorded in the log and the audit log; a flood adds few lines."""

import asyncio
import re

import pytest

from tickwheel.web import failed_logins
from tickwheel.web.failed_logins import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, FailedLogins
from web.serving import create_token, wait_until

UNKNOWN = f"tw_{'0' * 12}_{'A' * 43}"


class Notes:
    """Records the lines for the audit log."""

    def __init__(self):
        self.lines = []

    async def __call__(self, action, target, *, actor, request, detail):
        self.lines.append((action, target, actor, request, detail))


def count_of(detail):
    return int(re.match(r"failed log-ins: (\d+), the last from ", detail)[1])


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


def failing(scenario):
    """Run a coroutine function with `FailedLogins` and its lines, on a loop with jumping time."""

    async def run():
        notes = Notes()
        await scenario(FailedLogins(notes), notes.lines)

    return run()


@pytest.fixture
def jump(jumping_event_loop):
    return lambda scenario: jumping_event_loop.run_until_complete(failing(scenario))


class TestFailedLogins:
    def test_the_first_is_recorded_at_once(self, jump, caplog):
        async def scenario(failed, lines):
            failed.add("abc", "it is unknown", "203.0.113.9", "r-1")
            await settled()
            detail = "failed log-ins: 1, the last from 203.0.113.9: it is unknown"
            assert lines == [("token.refuse", "abc", "203.0.113.9", "r-1", detail)]
            await failed.close()

        jump(scenario)
        assert [record.getMessage() for record in caplog.records] == [
            "failed log-ins: 1, the last from 203.0.113.9: it is unknown (token abc)"
        ]

    def test_a_flood_adds_few_lines_which_count_all(self, jump):
        async def scenario(failed, lines):
            for number in range(8640):
                failed.add("abc", "it is unknown", "203.0.113.9", f"r-{number}")
                await asyncio.sleep(10)
            await failed.close()
            assert len(lines) < 35
            counts = [count_of(detail) for *_, detail in lines]
            assert sum(counts) == 8640
            assert max(counts) <= LONGEST_PAUSE_SECONDS / 10 + 1

        jump(scenario)

    def test_after_a_quiet_time_the_next_is_recorded_at_once(self, jump):
        async def scenario(failed, lines):
            for seconds in (0, 1, 10 * FIRST_PAUSE_SECONDS):
                await asyncio.sleep(seconds)
                failed.add("abc", "it is unknown", "203.0.113.9", "r-1")
                await settled()
            assert len(lines) == 3
            await failed.close()
            assert len(lines) == 3

        jump(scenario)

    def test_a_stop_records_the_rest(self, jump):
        async def scenario(failed, lines):
            for _ in range(10):
                failed.add("abc", "it is unknown", "203.0.113.9", "r-1")
            await failed.close()
            assert [count_of(detail) for *_, detail in lines] == [1, 9]

        jump(scenario)


class TestOverHttp:
    def lines(self, api, token):
        items = api.get("/v1/audit", token=token, status=200).json["items"]
        return [one for one in items if one["action"] == "token.refuse"]

    def test_a_flood_of_bad_tokens_leaves_a_line_and_then_their_number(
        self, make_api, monkeypatch, caplog
    ):
        monkeypatch.setattr(failed_logins, "FIRST_PAUSE_SECONDS", 0.2)
        api = make_api()
        good = api.token("admin")
        asked = [("GET", "/v1/tasks", None, {"token": UNKNOWN})] * 300
        for answer in api.together(*asked):
            answer.refused(401, "unauthorized")
        counted = 0

        def all_counted():
            return sum(count_of(one["detail"]) for one in self.lines(api, good)) == 300

        while not all_counted():
            api.run(asyncio.sleep(0.05))
            counted += 1
            assert counted < 400
        found = self.lines(api, good)
        assert len(found) <= 5
        assert {one["target"] for one in found} == {"0" * 12}
        assert UNKNOWN[16:] not in caplog.text + str(found)

    @pytest.mark.parametrize("given", ["Bearer hunter2", "Basic aHVudGVyMg==", "Bearer " + UNKNOWN])
    def test_neither_log_shows_the_token(self, make_api, given, caplog):
        api = make_api()
        good = api.token("admin")
        api.get("/v1/tasks", headers={"authorization": given}).refused(401, "unauthorized")
        api.run(api.app.failed_logins.close())
        (line,) = self.lines(api, good)
        for text in (caplog.text, str(line)):
            assert "log-in" in text
            assert "hunter2" not in text
            assert "aHVudGVyMg" not in text
            assert "A" * 43 not in text

    def test_a_request_without_a_token_is_not_a_failed_login(self, make_api):
        api = make_api()
        good = api.token("admin")
        api.get("/v1/tasks").refused(401, "unauthorized")
        assert self.lines(api, good) == []

    def test_a_server_records_the_address_and_counts_until_it_stops(self, serve, sqlite_url):
        good = create_token(sqlite_url, "admin")
        server = serve()
        for _ in range(20):
            server.get("/v1/tasks", token=UNKNOWN).refused(401, "unauthorized")
        wait_until(lambda: self.lines(server, good), "it is noted")
        (line,) = self.lines(server, good)
        assert line["actor"] == "127.0.0.1"
        assert line["detail"].startswith("failed log-ins: 1, the last from 127.0.0.1")
        server.stop()
        again = serve()
        last, first = self.lines(again, good)
        assert first == line
        assert count_of(last["detail"]) == 19
        assert server.log().count("failed log-ins") == 2
