"""Programs of docs/how-to/migrate.md run, in Python with the libraries they use, and in Java."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tickwheel.client import Client

PAGE = (Path(__file__).resolve().parent.parent / "docs/how-to/migrate.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## From (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
BEFORE = re.compile(r"^Before.*?:\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AFTER = re.compile(r"^```(python|sh)$", re.MULTILINE)
JAVA = re.compile(r"^```java\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 60

# What the blocks in Java leave out. The queues give at once what they hold.
PROGRAM = """
import java.net.URI;
import java.net.http.*;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.concurrent.*;

class Program {{
    record Expiry(String order, long delay, TimeUnit unit) implements Delayed {{
        public long getDelay(TimeUnit unit) {{ return 0; }}
        public int compareTo(Delayed other) {{ return 0; }}
    }}
    interface RBlockingQueue<V> extends BlockingQueue<V> {{}}
    interface RDelayedQueue<V> {{
        void offer(V value, long delay, TimeUnit unit);
        boolean remove(Object value);
    }}
    static class Orders extends LinkedBlockingQueue<String> implements RBlockingQueue<String> {{}}
    static class Redisson {{
        RBlockingQueue<String> getBlockingQueue(String name) {{ return new Orders(); }}
        RDelayedQueue<String> getDelayedQueue(RBlockingQueue<String> queue) {{
            return new RDelayedQueue<>() {{
                public void offer(String value, long delay, TimeUnit unit) {{ queue.add(value); }}
                public boolean remove(Object value) {{ return queue.contains(value); }}
            }};
        }}
    }}
    static void close(String order) {{}}

    public static void main(String[] arguments) throws Exception {{
        Expiry expiry = new Expiry("o-2", 30, TimeUnit.MINUTES);
        ScheduledExecutorService executor = Executors.newScheduledThreadPool(1);
        Redisson redisson = new Redisson();
        {code}
        executor.shutdownNow();
        System.out.println({shown});
    }}
}}
"""


def test_every_section_has_the_code_before_and_after():
    assert len(SECTIONS) == 6
    for title, text in SECTIONS.items():
        assert len(BEFORE.findall(text)) == 1, title
        assert AFTER.search(text), title


@pytest.mark.parametrize(
    "title",
    [
        title
        for title, text in SECTIONS.items()
        if any(language == "py" for language, _ in BEFORE.findall(text))
    ],
)
def test_the_program_before_runs(title, tmp_path):
    code = BEFORE.search(SECTIONS[title])[2].replace("redis://localhost", "memory://")
    program = tmp_path / "before.py"
    program.write_text(code, "utf-8")
    ran = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)


def run_java(code, shown, folder):
    """Return what a program with this block prints of its last line's values."""
    program = folder / "Program.java"
    program.write_text(PROGRAM.format(code=code, shown=shown), "utf-8")
    ran = subprocess.run(
        ["java", "-XX:TieredStopAtLevel=1", program], capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    ("title", "shown", "printed"),
    [
        ("DelayQueue", 'due.order() + " " + future.isCancelled()', "o-1 true"),
        ("RDelayedQueue", "order", "o-1"),
    ],
    ids=["DelayQueue", "Redisson"],
)
def test_the_program_in_java_before_runs(title, shown, printed, tmp_path):
    [text] = [text for name, text in SECTIONS.items() if title in name]
    assert run_java(BEFORE.search(text)[2], shown, tmp_path) == printed


def test_the_program_in_java_after_submits_a_task(tmp_path):
    [text] = [text for name, text in SECTIONS.items() if "RDelayedQueue" in name]
    _, code = JAVA.findall(text)
    words = ["--store", f"sqlite:///{tmp_path}/tasks.db", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        [sys.executable, "-m", "tickwheel", "serve", *words, "--allow-private-targets"],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    ) as server:  # fmt: skip
        try:
            url = server.stdout.readline().split()[-1].rstrip("/")
            with Client(url) as client:
                client.put_service("orders", endpoint="http://127.0.0.1:9/")
                assert "http://127.0.0.1:7380" in code
                code = code.replace("http://127.0.0.1:7380", url)
                assert run_java(code, "status", tmp_path) == "201"
                [task] = client.list(service="orders").items
                assert (task.key, task.payload, task.state) == ("order:o-1", "o-1", "delay")
        finally:
            server.terminate()


def test_every_block_in_java_is_run():
    assert len(JAVA.findall(PAGE)) == 3
