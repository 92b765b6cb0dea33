"""Tasks from a stream: an array or lines, whole or in pieces."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.cli import bulk
from tickwheel.cli.bulk import InvalidTasks, Reader
from tickwheel.client import Json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
TASKS = st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=8)


class Pieces:
    """A stream that gives fewer characters than it is asked for, as a pipe does."""

    def __init__(self, text, sizes):
        self._text = io.StringIO(text, newline="")
        self._sizes = iter(sizes)

    def read(self, size):
        return self._text.read(min(size, next(self._sizes, size)))


@given(TASKS, st.lists(st.integers(1, 9), max_size=100), st.sampled_from([None, 1]))
def test_an_array_is_read_however_it_is_cut(tasks, sizes, indent):
    text = json.dumps(tasks, indent=indent, ensure_ascii=False)
    assert list(Reader(Pieces(text, sizes))) == tasks


@given(TASKS, st.lists(st.integers(1, 9), max_size=100), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_lines_are_read_however_they_are_cut(tasks, sizes, end):
    text = end.join(json.dumps(task) for task in tasks)
    assert list(Reader(Pieces(text, sizes))) == tasks


@given(
    st.lists(
        JSON.map(json.dumps) | st.sampled_from(["1.10", "1e400", '{"a": 1, "a": 2}']), max_size=5
    ),
    st.sampled_from(["[{}]", "{}"]),
    st.sampled_from(["{%s}", '{"payload": 0, "delay": 1.5, %s}', ' { "a":{"payload":1} ,\t%s }\r']),
    st.sampled_from(['"payload": ', '"pay\\u006coad":']),
)
def test_a_payload_is_the_text_that_stands_there(payloads, form, task, name):
    texts = [task.replace("%s", name + payload) for payload in payloads]
    text = form.replace("{}", ",".join(texts)) if form == "[{}]" else "\n".join(texts)
    read = list(Reader(Pieces(text, [3] * 50)))
    assert [one["payload"] for one in read] == [Json(payload) for payload in payloads]
    assert all(one.get("delay", 1.5) == 1.5 for one in read)


@given(TASKS, st.data())
def test_an_array_that_is_cut_short_gives_its_first_tasks_and_an_error(tasks, data):
    text = json.dumps(tasks)
    short = text[: data.draw(st.integers(1, len(text) - 1))]
    read = []
    with pytest.raises(InvalidTasks):
        read.extend(Reader(io.StringIO(short)))
    for task in Reader(Pieces(text, [1] * 5)):
        if len(read) == 0:
            break
        assert task == read.pop(0)


@pytest.mark.parametrize("text", ["", " \n", "[]", " [ ] ", "\ufeff[]", "\n\n\n"])
def test_nothing_is_no_tasks(text):
    assert list(Reader(io.StringIO(text))) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "task 1 cannot be read: a task is an object, and here stands '1]'"),
        ("1", "line 1 cannot be read: it is no JSON object: 1"),
        ('{"a": 1} {"b": 2}', "line 1 cannot be read: Extra data, at column 10"),
        ('[{"a": 1} {"b": 2}]', "task 2 cannot be read"),
        ('[{"a": 1},]', "task 2 cannot be read"),
        ('[,{"a": 1}]', "task 1 cannot be read"),
        ('[{"a": 1}', "task 2 cannot be read: the array has no end"),
        ('[{"a": 1}] x', "task 2 cannot be read: the array has ended before it"),
        ('[{"a": NaN}]', "task 1 cannot be read: NaN is not JSON"),
        ('{"a": Infinity}', "line 1 cannot be read: Infinity is not JSON"),
        ('[{"a": [' + "[" * 100_000, "task 1 cannot be read"),
        ('{"a": ' + "[" * 100_000, "line 1 cannot be read"),
        ('\n\n{"a": 1}\n\n{oops', "line 5 cannot be read: Expecting property name"),
        ("\n" * 100_000 + '{"a": 1}\n' * 20_000 + "oops\n", "line 120001 cannot be read"),
    ],
)
def test_what_is_no_task_is_said_to_be_none(text, message):
    with pytest.raises(InvalidTasks) as raised:
        list(Reader(io.StringIO(text)))
    assert message in str(raised.value)


def test_what_is_not_utf_8_is_said_to_be_so():
    stream = io.TextIOWrapper(io.BytesIO(b'{"a": "\xff"}'), encoding="utf-8")
    with pytest.raises(InvalidTasks, match="not UTF-8"):
        list(Reader(stream))


@pytest.mark.parametrize("start", ["[", ""])
def test_a_task_without_end_is_not_read_for_ever(start, monkeypatch):
    monkeypatch.setattr(bulk, "MAX_TASK_CHARACTERS", 200_000)

    class Endless:
        given = 0

        def read(self, size):
            text = (start + '{"a": "' if not self.given else "").ljust(size, "x")
            self.given += len(text)
            return text

    stream = Endless()
    with pytest.raises(InvalidTasks, match="longer than 16 MiB"):
        list(Reader(stream))
    assert stream.given < 1_000_000


def test_only_a_chunk_is_read_ahead():
    line = '{"service": "s", "payload": "' + "x" * 1000 + '"}'
    for text in ("\n".join([line] * 1000), f"[{','.join([line] * 1000)}]"):
        stream = io.StringIO(text)
        next(iter(Reader(stream)))
        assert stream.tell() <= 2 * bulk.CHUNK_CHARACTERS


def test_it_knows_how_many_bytes_were_read():
    text = json.dumps([{"a": "é"}], ensure_ascii=False)
    reader = Reader(io.StringIO(text))
    list(reader)
    assert reader.read_bytes == len(text.encode())
