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
    """A stream that returns fewer characters than requested, as a pipe does."""

    def __init__(self, text, sizes):
        self._text = io.StringIO(text, newline="")
        self._sizes = iter(sizes)

    def read(self, size):
        return self._text.read(min(size, next(self._sizes, size)))


@given(TASKS, st.lists(st.integers(1, 9), max_size=100), st.sampled_from([None, 1]))
def test_an_array_may_arrive_in_pieces_of_any_size(tasks, sizes, indent):
    text = json.dumps(tasks, indent=indent, ensure_ascii=False)
    assert list(Reader(Pieces(text, sizes))) == tasks


@given(TASKS, st.lists(st.integers(1, 9), max_size=100), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_lines_may_arrive_in_pieces_of_any_size(tasks, sizes, end):
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
def test_a_payload_keeps_its_text(payloads, form, task, name):
    texts = [task.replace("%s", name + payload) for payload in payloads]
    text = form.replace("{}", ",".join(texts)) if form == "[{}]" else "\n".join(texts)
    read = list(Reader(Pieces(text, [3] * 50)))
    assert [one["payload"] for one in read] == [Json(payload) for payload in payloads]
    assert all(one.get("delay", 1.5) == 1.5 for one in read)


@given(TASKS, st.data())
def test_a_truncated_array_yields_its_first_tasks_and_an_error(tasks, data):
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
def test_empty_input_has_no_tasks(text):
    assert list(Reader(io.StringIO(text))) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "task 1 cannot be read: a task must be a JSON object, not '1]'"),
        ("1", "line 1 cannot be read: it is not a JSON object: 1"),
        ('{"a": 1} {"b": 2}', "line 1 cannot be read: Extra data, at column 10"),
        ('[{"a": 1} {"b": 2}]', "task 2 cannot be read"),
        ('[{"a": 1},]', "task 2 cannot be read"),
        ('[,{"a": 1}]', "task 1 cannot be read"),
        ('[{"a": 1}', "task 2 cannot be read: the array does not end"),
        ('[{"a": 1}] x', "task 2 cannot be read: the array has already ended"),
        ('[{"a": NaN}]', "task 1 cannot be read: NaN is not JSON"),
        ('{"a": Infinity}', "line 1 cannot be read: Infinity is not JSON"),
        ('[{"a": [' + "[" * 100_000, "task 1 cannot be read"),
        ('{"a": ' + "[" * 100_000, "line 1 cannot be read"),
        ('\n\n{"a": 1}\n\n{oops', "line 5 cannot be read: Expecting property name"),
        ("\n" * 100_000 + '{"a": 1}\n' * 20_000 + "oops\n", "line 120001 cannot be read"),
    ],
)
def test_invalid_input_is_reported(text, message):
    with pytest.raises(InvalidTasks) as raised:
        list(Reader(io.StringIO(text)))
    assert message in str(raised.value)


def test_input_that_is_not_utf_8_is_reported():
    stream = io.TextIOWrapper(io.BytesIO(b'{"a": "\xff"}'), encoding="utf-8")
    with pytest.raises(InvalidTasks, match="not UTF-8"):
        list(Reader(stream))


@pytest.mark.parametrize("start", ["[", ""])
def test_a_task_over_the_size_limit_is_refused(start, monkeypatch):
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


def test_the_reader_reads_only_one_chunk_ahead():
    line = '{"service": "s", "payload": "' + "x" * 1000 + '"}'
    for text in ("\n".join([line] * 1000), f"[{','.join([line] * 1000)}]"):
        stream = io.StringIO(text)
        next(iter(Reader(stream)))
        assert stream.tell() <= 2 * bulk.CHUNK_CHARACTERS


def test_the_reader_counts_bytes():
    text = json.dumps([{"a": "é"}], ensure_ascii=False)
    reader = Reader(io.StringIO(text))
    list(reader)
    assert reader.read_bytes == len(text.encode())
