"""`manage.py tickwheel`: run the task functions of the project until a signal stops it."""

from __future__ import annotations

import sys
from argparse import SUPPRESS
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from django.apps import apps as django_apps
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.utils.autoreload import get_child_arguments

from tickwheel.cli.worker import UNWATCHED, Options, run_worker
from tickwheel.django.project import scheduler

if TYPE_CHECKING:
    from argparse import ArgumentParser

USAGE = 2


class Command(BaseCommand):  # type: ignore[misc]
    """The command; its options are those of `tickwheel worker`."""

    help = "Run the task functions of this project until SIGTERM or Ctrl-C."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        # fmt: off
        add = parser.add_argument
        add("--only", action="append", default=[], metavar="FUNCTION",
            help="run only this task function; may be repeated")
        add("--processes", type=int, default=1, help="how many processes, 1 to 256; by default one")
        add("--reload", action="store_true",
            help="for development: start again when a Python file of the project changes")
        add("--metrics-listen", metavar="HOST:PORT",
            help="answer Prometheus at http://HOST:PORT/metrics")
        add("--lifeline", type=int, help=SUPPRESS)
        add("--shared-metrics", help=SUPPRESS)
        # fmt: on

    def handle(self, *_: Any, **options: Any) -> None:
        """Run a worker, here or in other processes."""
        own = {name: options[name] for name in Options._fields}
        try:
            code = run_worker(
                lambda: scheduler, settings.SETTINGS_MODULE, child_command(options),
                Options(**own), project_folders(),
            )  # fmt: skip
        except click.UsageError as error:
            raise CommandError(error.format_message(), returncode=USAGE) from error
        if code:
            sys.exit(code)


def project_folders() -> list[Path]:
    """Return the folders of the project's own code: that of its settings, and its apps."""
    package = sys.modules[settings.SETTINGS_MODULE.partition(".")[0]]
    top = [*getattr(package, "__path__", ())] or [str(package.__file__)]
    apps = [app.path for app in django_apps.get_app_configs()]
    folders = {Path(top[0]).resolve().parent, *(Path(path).resolve() for path in apps)}
    own = {folder for folder in folders if UNWATCHED.isdisjoint(folder.parts)}
    return sorted(folder for folder in own if own.isdisjoint(folder.parents))


def child_command(options: dict[str, Any]) -> list[str]:
    """Return the command that starts one worker, however this one was started."""
    words = get_child_arguments()
    command = [*words[: len(words) - len(sys.argv[1:])], "tickwheel"]
    if options["pythonpath"]:
        command += ["--pythonpath", options["pythonpath"]]
    return command
