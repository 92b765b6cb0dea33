"""Samples of a soak: what processes and stores have at one moment."""

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg

import servers

TABLES = ("task", "backlog", "attempt", "idempotency", "accepted", "schedule", "service", "token",
          "audit")  # fmt: skip


def process(pid):
    """Return what a process has: anonymous memory, with what is swapped out; counts."""
    where = Path(f"/proc/{pid}")
    return {
        "memory": anonymous(pid),
        "descriptors": len([*(where / "fd").iterdir()]),
        "threads": len([*(where / "task").iterdir()]),
    }


def anonymous(pid):
    """Return the bytes of memory that no file backs; shared pages are divided among processes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.findall(r"^(?:Pss_Anon|SwapPss): +(\d+) kB$", text, re.MULTILINE)
    return 1024 * sum(map(int, found))


def anonymous_or_none(pid):
    """Return the same, or None if the process has ended."""
    try:
        return anonymous(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None


def cpu_seconds(pid):
    """Return the processor time of a process, and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Postgres:
    """A PostgreSQL server and one database of it."""

    def __init__(self, server, url):
        self._server = server
        self._connection = psycopg.connect(url, autocommit=True, application_name="soak")
        self.close = self._connection.close

    def sample(self):
        """Return the mean memory of its backends, how many there are, bytes, rows by table."""
        counts = ", ".join(f"(SELECT count(*) FROM tickwheel.{table})" for table in TABLES)
        pids, size, *rows = self._connection.execute(f"""
            SELECT ARRAY(
                SELECT pid FROM pg_stat_activity
                WHERE datname = current_database() AND backend_type = 'client backend'
                AND application_name <> 'soak'
            ), pg_database_size(current_database()), {counts}
        """).fetchone()
        memory = [one for one in map(anonymous_or_none, pids) if one is not None]
        tables = {f"table {name}": {"rows": number}
                  for name, number in zip(TABLES, rows, strict=True)}  # fmt: skip
        backends = {"memory": sum(memory) // max(1, len(memory)), "connections": len(pids)}
        return {"postgres": {**backends, "bytes": size}, **tables}

    def cpu_seconds(self):
        pids = [self._server.pid, *servers._descendants(self._server.pid)]
        return sum(map(cpu_seconds, pids))


def sqlite(path):
    """Return the bytes of the files of a store on SQLite, and its rows."""
    files = [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))]
    size = sum(file.stat().st_size for file in files if file.exists())
    tables = ("task", "backlog", "attempt", "idempotency", "audit", "schedule")
    counts = " + ".join(f"(SELECT count(*) FROM {table})" for table in tables)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as database:
        rows = database.execute(f"SELECT {counts}").fetchone()[0]
    return {"sqlite": {"bytes": size, "rows": rows}}
