"""APScheduler 3 on SQLite: `add_job("date", …)`, in the client's own process on 32 threads."""

from __future__ import annotations

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from peer import BROKER, Peer, aware


class APSchedulerPeer(Peer):
    """Its scheduler runs in the submitting process; late jobs are run, too."""

    def prepare(self) -> None:
        self._scheduler = BackgroundScheduler(
            jobstores={"default": SQLAlchemyJobStore(url=f"sqlite:///{BROKER}")},
            executors={"default": ThreadPoolExecutor(32)},
            job_defaults={"misfire_grace_time": None},
        )
        self._scheduler.start(paused=True)

    def submit(self, dues: dict[int, float]) -> None:
        for number, due in dues.items():
            self._scheduler.add_job("ledger:note", "date", run_date=aware(due), args=(number,))

    def clear(self) -> None:
        self._scheduler.remove_all_jobs()

    def start(self) -> None:
        self._scheduler.resume()

    def stop(self) -> None:
        self._scheduler.shutdown(wait=False)


peer = APSchedulerPeer
