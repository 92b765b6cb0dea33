"""Tags of the embedded API: given by submit, shown, and filtered by; bad ones are named."""

from datetime import timedelta

import pytest

from tickwheel.durable import Scheduler, State
from tickwheel.errors import KeyReused
from tickwheel.values.options import request_bytes
from tickwheel.values.task import join_tags

DAY = timedelta(days=1)


def nothing(*args):
    """A task function's body."""


@pytest.fixture
def app(tmp_path):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")
    app.task(name="mail")(nothing)
    app.task(name="report")(nothing)
    return app


@pytest.mark.parametrize(
    ("tags", "error", "message"),
    [
        ("import", TypeError, "tags must be a list of strings, got 'import'"),
        ({"a"}, TypeError, "tags must be a list of strings, got {'a'}"),
        (["a b"], ValueError, r"1 to 32 characters, ASCII letters, .* got 'a b'"),
        ([""], ValueError, "got ''"),
        (["a", 7], ValueError, "got 7"),
        (["größe"], ValueError, "got 'größe'"),
        (["a\n"], ValueError, r"got 'a\\n'"),
        (["x" * 33], ValueError, "got 'xxx"),
        (["a", "b", "a"], ValueError, "must differ, got 'a' twice"),
        ([*"abcdefghi"], ValueError, "a task may have 8 tags, got 9"),
    ],
)
def test_a_bad_tag_is_named_with_what_is_allowed(tags, error, message):
    with pytest.raises(error, match=message):
        join_tags(tags)


def test_tags_of_every_allowed_character_and_length():
    assert join_tags(["x" * 32, "A-z_0.9:"]) == f"{'x' * 32} A-z_0.9:"
    assert join_tags([]) is join_tags(()) is join_tags(None) is None
    assert len(join_tags([*"abcdefgh"]).split()) == 8


def test_requests_that_differ_in_tags_are_different_requests():
    def digest(**options):
        return request_bytes("mail", b"[]", options)

    assert digest(tags=["a"]) != digest(tags=["b"])
    assert digest(tags=["a", "b"]) != digest(tags=["b", "a"])
    assert digest(tags=("a",)) == digest(tags=["a"])


def test_tags_go_from_a_submit_to_its_replay(app):
    with app.blocking() as b:
        task = b.submit("mail", 1, delay=DAY, key="k", tags=["a", "b:c"])
        assert task.tags == b.get(task.id).tags == ("a", "b:c")
        task = b.submit("mail", 2, delay=DAY, key="k", on_conflict="replace", tags=("new",))
        assert b.get(task.id).tags == ("new",)
        b.cancel(task.id)
        again = b.replay(task.id, delay=DAY)
        assert (again.tags, b.backlog().items[0].tags) == (("new",), ("new",))


def test_many_tasks_have_tags_of_their_own(app):
    with app.blocking() as b:
        wanted = [{"service": "mail", "payload": [], "tags": [f"n{n % 3}"]} for n in range(30)]
        tasks = b.submit_many([{**one, "delay": DAY} for one in wanted])
        assert [task.tags for task in tasks] == [tuple(one["tags"]) for one in wanted]
        assert len(b.list(tag="n1").items) == 10


def test_a_repeated_request_with_other_tags_is_refused(app):
    with app.blocking() as b:
        first = b.submit("mail", 1, idempotency_key="once", delay=DAY, tags=["a"])
        assert b.submit("mail", 1, idempotency_key="once", delay=DAY, tags=["a"]).id == first.id
        with pytest.raises(KeyReused):
            b.submit("mail", 1, idempotency_key="once", delay=DAY, tags=["b"])


@pytest.fixture
def tagged(app):
    """Tasks of two services, by name; those of "one" and "two" have a tag in common."""
    with app.blocking() as b:
        tasks = {
            "one": b.submit("mail", 1, delay=DAY, tags=["import", "vip"]),
            "two": b.submit("report", 1, delay=DAY, tags=["import"]),
            "other": b.submit("mail", 1, delay=DAY, tags=["export"]),
            "none": b.submit("mail", 1, delay=DAY),
        }
        yield b, {name: task.id for name, task in tasks.items()}


def states(b, ids):
    return {name: b.get(task_id).state for name, task_id in ids.items()}


def test_a_list_takes_one_tag_or_several(tagged):
    b, ids = tagged
    assert {task.id for task in b.list(tag="import").items} == {ids["one"], ids["two"]}
    assert [task.id for task in b.list(tag=["vip", "import"]).items] == [ids["one"]]
    assert b.list(tag="import", service="report").items[0].id == ids["two"]
    assert b.list(tag=["import", "export"]).items == []
    assert len(b.list(tag=()).items) == 4
    with pytest.raises(ValueError, match="got 'im port'"):
        b.list(tag="im port")


def test_tasks_are_cancelled_by_tag_in_every_service(tagged):
    b, ids = tagged
    assert b.cancel_where(tag="import") == 2
    assert states(b, ids) == {
        "one": State.CANCELLED, "two": State.CANCELLED, "other": State.DELAY, "none": State.DELAY,
    }  # fmt: skip
    assert b.backlog(tag=["vip"]).items[0].id == ids["one"]
    assert b.replay_where(state=None, tag="vip") == 1
    assert {task.replay_of for task in b.list(tag="vip").items} == {None, ids["one"]}


def test_tasks_of_one_service_are_cancelled_by_tag(tagged):
    b, ids = tagged
    assert b.cancel_where(service="mail", tag="import") == 1
    assert states(b, ids)["two"] is State.DELAY


def test_tasks_are_rescheduled_by_tag(tagged):
    b, ids = tagged
    before = b.get(ids["none"]).due_at
    assert b.reschedule_where(tag="import", delay=2 * DAY) == 2
    assert b.get(ids["one"]).due_at > before < b.get(ids["two"]).due_at
    assert b.get(ids["none"]).due_at == before


def test_a_change_of_many_without_a_choice_is_refused(tagged):
    b, _ = tagged
    with pytest.raises(ValueError, match="give service, key or tag"):
        b.cancel_where(tag=[])
    with pytest.raises(ValueError, match="give state, service, key or tag"):
        b.replay_where()
