"""A Django project with the app: processes of manage.py as in the docs, the admin, the settings."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from servers import wait_until
from tickwheel.durable import Scheduler, State

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "durable-web-frameworks.md"
RECIPES = dict(
    re.findall(r"^`([\w./]+)`\n\n```py\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
SCHEDULES = PAGE.with_name("durable-schedules.md")
COMMAND = "orders/management/commands/put_schedules.py"
LONG = 60
FILES = {
    "manage.py": """
import os, sys
from django.core.management import execute_from_command_line
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
execute_from_command_line(sys.argv)
""",
    "mysite/__init__.py": "",
    "mysite/urls.py": """
from django.contrib import admin
from django.db import transaction
from django.urls import path
from orders.views import order, paid

def rolled_back(request, order_id):
    with transaction.atomic():
        answer = order(request, order_id)
        transaction.set_rollback(True)
    return answer

urlpatterns = [
    path("orders/<int:order_id>", order),
    path("paid/<int:order_id>", paid),
    path("rolled-back/<int:order_id>", rolled_back),
    path("admin/", admin.site.urls),
]
""",
    "mysite/wsgi.py": """
import os
from django.core.wsgi import get_wsgi_application
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
application = get_wsgi_application()
""",
    "orders/__init__.py": "",
    "orders/models.py": """
from django.db import models

class Order(models.Model):
    id = models.IntegerField(primary_key=True)
    state = models.CharField(max_length=20, default="open")
""",
    "orders/tasks.py": RECIPES["orders/tasks.py"],
    "orders/views.py": RECIPES["orders/views.py"],
    "orders/tests.py": RECIPES["orders/tests.py"],
    "orders/test_views.py": """
from django.db import connection
from django.test import TestCase, TransactionTestCase
from orders.models import Order
from orders.tasks import expire
from tickwheel.django import scheduler

class SubmitTest(TestCase):
    def test_a_view(self):
        for _ in range(2):
            with self.captureOnCommitCallbacks(execute=True):
                self.assertEqual(self.client.post("/orders/1").status_code, 200)
            self.assertEqual(self.client.post("/paid/1").json(), {"in_time": True})
            scheduler.started().stop()  # the next view starts it again
            self.assertFalse(scheduler.running)
            Order.objects.all().delete()

class CommitTest(TransactionTestCase):
    def test_a_view(self):
        self.client.post("/orders/1")
        expire.submit_sync(2, connection=connection)
        self.assertEqual(len(scheduler.started().list().items), 2)

    def test_the_start_of_a_test_forgets_earlier_tasks(self):
        expire.submit_sync(3)
        with scheduler.blocking() as b:
            self.assertEqual(b.run_due(), [])
""",
}
SETTINGS = """
SECRET_KEY = "secret"
DEBUG = True
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "mysite.urls"
STATIC_URL = "static/"
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
    "django.contrib.messages", "django.contrib.sessions", "orders",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [{
    "BACKEND": "django.template.backends.django.DjangoTemplates",
    "APP_DIRS": True,
    "OPTIONS": {"context_processors": [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]},
}]
"""


class Project:
    """A Django project in a directory, and the processes that were started there."""

    def __init__(self, path, database):
        self.path = path
        settings = f"{SETTINGS}\nDATABASES = {{'default': {database!r}}}\n"
        files = FILES | {"mysite/settings.py": settings + RECIPES["mysite/settings.py"]}
        for name, text in files.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(text)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def run(self, *words, code=0):
        """Run a command of manage.py to its end, and return what it printed."""
        command = [sys.executable, *words]
        environ = os.environ | {"DJANGO_SETTINGS_MODULE": "mysite.settings"}
        ended = subprocess.run(
            command, cwd=self.path, env=environ, check=False, timeout=LONG,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert ended.returncode == code, ended.stdout
        return ended.stdout

    def script(self, text):
        """Run a program with the project's settings."""
        return self.run("-c", f"import django; django.setup()\n{text}")

    @contextlib.contextmanager
    def started(self, *words, program="manage.py", cwd="."):
        """Start a command of manage.py; in the end it must stop well, without a traceback."""
        log = self.path / words[0]
        with log.open("w") as said:
            process = subprocess.Popen(
                [sys.executable, *program.split(), *words], cwd=self.path / cwd, stdout=said,
                stderr=said, start_new_session=True,
                env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            )  # fmt: skip
        try:
            yield log
            process.send_signal(signal.SIGINT)
            process.wait(LONG)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(LONG)
        assert "Traceback" not in log.read_text(), log.read_text()

    def get(self, path):
        """Return whether a request is answered well."""
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{self.port}{path}"
            with urllib.request.urlopen(url, timeout=LONG) as answer:
                return answer.read().decode()
        return None


def sqlite_database(path):
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path / "db.sqlite3")}


@pytest.fixture(scope="module")
def migrated(tmp_path_factory):
    """The database of a new project."""
    path = tmp_path_factory.mktemp("migrated")
    Project(path, sqlite_database(path)).run("manage.py", "migrate", "--run-syncdb", "-v0")
    return path / "db.sqlite3"


@pytest.fixture
def project(tmp_path, migrated):
    shutil.copy(migrated, tmp_path)
    return Project(tmp_path, sqlite_database(tmp_path))


def check_orders(project, store):
    """Submit orders over HTTP: those that were committed run, once, and no other."""
    wait_until(lambda: project.get("/orders/1"), "it serves")
    assert project.get("/rolled-back/2")
    with Scheduler(store, dispatch=False).blocking() as b:
        (task,) = b.list(key="order:1").items
        assert b.list(key="order:2").items == []
        b.reschedule(task.id, delay=0)
        assert b.wait(task, timeout=LONG).state is State.FINISHED
        assert len(b.attempts(task.id)) == 1
        assert project.get("/paid/1") == '{"in_time": false}'
        assert project.get("/orders/3")
        assert project.get("/paid/3") == '{"in_time": true}'
        return task


def test_runserver_and_a_worker_run_the_committed_orders_once_and_reload(project):
    """The worker is started elsewhere."""
    store = f"sqlite:///{project.path}/tickwheel.db"
    serve = ("runserver", f"127.0.0.1:{project.port}", "--skip-checks")
    work = project.started("tickwheel", "--reload", program="../manage.py", cwd="mysite")
    with project.started(*serve), work as log:
        check_orders(project, store)
        tasks, views = project.path / "orders" / "tasks.py", project.path / "orders" / "views.py"
        tasks.write_text(tasks.read_text() + '    return "new"\n')
        views.write_text(views.read_text().replace('"in_time":', '"new": True, "in_time":'))
        wait_until(lambda: len(re.findall("runs expire", log.read_text())) == 2, "it starts again")
        wait_until(lambda: '"new"' in (project.get("/paid/1") or ""), "the new code serves")
        assert project.get("/orders/4")
        with Scheduler(store, dispatch=False).blocking() as b:
            (task,) = b.list(key="order:4").items
            b.reschedule(task.id, delay=0)
            assert b.wait(task, timeout=LONG).result == "new"
            assert len(b.attempts(task.id)) == 1
    found = "from orders.models import Order\nprint([*Order.objects.values_list()])"
    assert project.script(found) == "[(1, 'expired'), (3, 'open'), (4, 'expired')]\n"


def test_on_postgresql_under_gunicorn_a_task_is_in_the_transaction_of_its_view(
    tmp_path, postgres_url
):
    parts = urlsplit(postgres_url)
    project = Project(tmp_path, {
        "ENGINE": "django.db.backends.postgresql", "NAME": parts.path[1:], "USER": parts.username,
        "PASSWORD": parts.password or "", "HOST": parts.hostname, "PORT": str(parts.port),
    })  # fmt: skip
    project.run("manage.py", "migrate", "--run-syncdb", "-v0")
    serve = ("--preload", "-w", "2", "-b", f"127.0.0.1:{project.port}", "mysite.wsgi")
    with project.started(*serve, program="-m gunicorn"), project.started("tickwheel"):
        check_orders(project, postgres_url)
    within = """
from django.db import connection, transaction
from orders.tasks import expire
from tickwheel.django import scheduler, submit_on_commit

with transaction.atomic():
    submit_on_commit(expire, 7, delay=60)
    with connection.cursor() as cursor:  # the same transaction sees it, others do not yet
        cursor.execute("SELECT count(*) FROM tickwheel.task")
        print(cursor.fetchone()[0], len(scheduler.started().list(final=False).items))
print(len(scheduler.started().list(final=False).items))
"""
    assert project.script(within) == "1 0\n1\n"
    assert "OK" in project.run("manage.py", "test", "--noinput")


def test_the_command_puts_the_schedule_and_runs_no_task(project):
    path = project.path / COMMAND
    path.parent.mkdir(parents=True)
    path.write_text(
        SCHEDULES.read_text("utf-8").split(f"`{COMMAND}`\n\n```py\n")[1].split("```")[0]
    )
    for _ in range(2):
        assert project.run("manage.py", "put_schedules") == ""
    store = f"sqlite:///{project.path}/tickwheel.db"
    with Scheduler(store, dispatch=False).blocking() as b:
        assert [schedule.name for schedule in b.schedules()] == ["sweep"]
        assert b.list(final=None).items == []


def test_tests_of_views_and_the_recipe_leave_no_trace(project):
    with (project.path / "mysite" / "settings.py").open("a") as settings:
        settings.write("TICKWHEEL = {'url': 'sqlite:///real.db'}\n")
    assert "OK" in project.run("manage.py", "test")
    assert not list(project.path.glob("*.db"))


def test_the_fixture_of_pytest_moves_the_scheduler_to_memory_and_back(project):
    (project.path / "test_fixture.py").write_text("""
import django

django.setup()
from orders.tasks import expire
from tickwheel.django import scheduler as own

def test_a_submit(scheduler, manual_clock):
    assert scheduler is own
    expire.submit_sync(1, delay=60)  # as a view does
    manual_clock.advance(60)
    assert [task.state for task in scheduler.started().run_due()] == ["finished"]

def test_a_start(scheduler):
    expire.submit_sync(1)
    with scheduler.blocking() as b:
        assert b.list().items == []

def test_afterwards_it_is_where_it_was():
    assert (own.running, own.database) == (False, "default")
    expire.submit_sync(1, delay=60)
""")
    settings = "[pytest]\npythonpath = .\ntickwheel_app = tickwheel.django:scheduler\n"
    (project.path / "pytest.ini").write_text(settings)
    assert "3 passed" in project.run("-m", "pytest", "test_fixture.py")
    assert (project.path / "tickwheel.db").exists()


def test_other_commands_work_and_start_nothing(project):
    said = project.script("""
from django.core.management import call_command

call_command("makemigrations", "tickwheel", check=True, dry_run=True)
call_command("dumpdata", use_base_manager=True)
""")
    assert '"contenttypes.contenttype"' in said
    assert '"tickwheel.task"' not in said
    assert not (project.path / "tickwheel.db").exists()
    wrong = project.run("manage.py", "tickwheel", "--only", "nothing", code=2)
    assert "CommandError: dispatch must name task functions" in wrong
    wrong = project.run("manage.py", "tickwheel", "--processes", "0", code=2)
    assert "CommandError: --processes must be 1 to 256, got 0" in wrong
    windows = "import signal, runpy; del signal.SIGHUP; runpy.run_path('manage.py', {}, '__main__')"
    wrong = project.run("-c", windows, "tickwheel", code=2)
    assert "CommandError: a worker runs on Linux and macOS" in wrong


def test_a_process_that_forks_submits_on_both_sides(project):
    text = """
import os
from orders.tasks import expire
from tickwheel.django import scheduler

expire.submit_sync(1, delay=60)
if (child := os.fork()) == 0:
    expire.submit_sync(2, delay=60)
    os._exit(0)
print(os.waitpid(child, 0)[1], len(scheduler.started().list().items))
"""
    assert project.script(text).splitlines()[-1] == "0 2"  # Python 3.12 warns of the thread


ADMIN = """
import re
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse
from orders.tasks import expire
from tickwheel.django import scheduler

def browser(name, *permissions):
    user = User.objects.create_user(name, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    return client

def page(client, address, **query):
    answer = client.get(address, query)
    return answer.status_code, answer.content.decode()

def act(client, address, **form):
    token = re.search('csrfmiddlewaretoken" value="(.*?)"', client.get(tasks).content.decode())[1]
    sent = client.post(address, {**form, "csrfmiddlewaretoken": token}, follow=True)
    said = re.findall('<li class="(?:success|error|warning)">(.*?)</li>', sent.content.decode())
    return sent.status_code, said

def address(task):
    return reverse("admin:tickwheel_task_change", args=[task.id])

tasks, b = reverse("admin:tickwheel_task_changelist"), scheduler.started()
one = expire.submit_sync("<script>", delay=60, key="order:1", tags=["shop", "vip"])
two = expire.submit_sync(2, delay=60, key="order:2")
reader, clerk = browser("reader", "view_task"), browser("clerk", "view_task", "change_task")
"""


def test_the_admin_lists_tasks_and_shows_one(project):
    text = (
        ADMIN
        + """
assert "Tasks" in page(reader, reverse("admin:index"))[1]
assert Client().get(tasks).status_code == 302
assert page(browser("stranger"), tasks)[0] == 403
for query, found in [
    ({}, [one, two]), ({"key": "order:1"}, [one]), ({"tag": "vip shop"}, [one]),
    ({"state": "failed"}, []), ({"service": "expire", "state": "delay"}, [one, two]),
]:
    status, shown = page(reader, tasks, **query)
    assert status == 200
    assert [task for task in (one, two) if task.id in shown] == found, query
assert "&#x27;lost&#x27;" in page(reader, tasks, state="lost")[1]
status, shown = page(reader, address(one))
assert "&lt;script&gt;" in shown and "<script>\\"" not in shown
assert page(reader, reverse("admin:tickwheel_task_change", args=["nothing"]))[0] == 404
expire.submit_sync(["not", "an", "id"], key="bad", max_attempts=1)
[failed] = b.run_due()
status, shown = page(reader, address(failed))
assert "Traceback" in shown and ">fail<" in shown

@scheduler.task(max_attempts=1)
def noted():
    error = ValueError("no luck")
    error.add_note("a note")
    raise error

noted.submit_sync()
b.run_due()
assert "<td>ValueError: no luck</td>" in page(reader, tasks, service="noted")[1]
import tickwheel.django.admin as module
module.PAGE_TASKS = 2
status, shown = page(reader, tasks)
following = re.search(r'href="\\?(cursor=.*?)"', shown)[1]
assert one.id not in shown and one.id in page(reader, f"{tasks}?{following}")[1]
"""
    )
    project.script(text)


def test_the_admin_acts_for_those_who_may(project):
    text = (
        ADMIN
        + """
assert act(reader, address(one), action="cancel") == (403, [])
assert clerk.post(address(one), {"action": "cancel"}).status_code == 403  # no token of CSRF
assert b.get(one.id).state == "delay"
assert act(clerk, address(one), action="cancel") == (200, ["Cancel: 1"])
assert b.get(one.id).state == "cancelled"
assert act(clerk, tasks, action="run", task=[one.id, two.id]) == (
    200, [f"{one.id}: the task is cancelled", "Run now: 1"])
assert [task.id for task in b.run_due()] == [two.id]
assert act(clerk, tasks, action="replay", task=[one.id]) == (200, ["Replay: 1"])
assert b.get(b.get(one.id).replayed_as).replay_of == one.id
assert act(clerk, tasks, action="", task=[one.id]) == (200, ["Choose tasks and an action."])
lines = [(line.actor, line.action, line.target) for line in b.audit()[0]]
assert lines == [("django:clerk", "task.replay", one.id), ("django:clerk", "task.run", two.id),
                 ("django:clerk", "task.cancel", one.id)], lines
"""
    )
    project.script(text)


def test_the_admin_says_that_the_store_is_down(project):
    text = (
        ADMIN
        + """
from tickwheel.durable import Blocking
from tickwheel.errors import StoreUnavailable

def fails(*args, **options):
    raise StoreUnavailable("lost <it>")

note, Blocking.note = Blocking.note, fails
done = act(clerk, tasks, action="run", task=[one.id, two.id])
assert done == (200, ["Run now: 2", "Not in the audit log: lost &lt;it&gt;"]), done
Blocking.note = note
scheduler.rebind("postgresql://127.0.0.1:1/tasks")  # nothing listens there
shown = reader.get(address(one), follow=True)
assert shown.redirect_chain == [(tasks, 302)]
assert "PostgreSQL" in shown.content.decode(), shown.content.decode()
status, said = act(clerk, address(two), action="cancel")
assert status == 200 and said[0].startswith(f"{two.id}: "), said
"""
    )
    project.script(text)


def test_the_store_follows_from_the_databases_of_the_settings(tmp_path):
    (tmp_path / "mysite").mkdir()
    (tmp_path / "mysite" / "settings.py").write_text("""
POSTGRES = {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "a b/db.sqlite3"},
    "memory": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    "plain": POSTGRES,
    "full": {**POSTGRES, "USER": "u@x", "PASSWORD": "p/w", "HOST": "/run/pg", "PORT": "5433",
             "OPTIONS": {"sslrootcert": "/my certs/ca", "pool": True}},
    "unnamed": {**POSTGRES, "NAME": "", "OPTIONS": {"service": "shop"}},
    "dummy": {"ENGINE": "django.db.backends.dummy"},
}
""")
    project = Project.__new__(Project)
    project.path = tmp_path
    text = """
from django.core.exceptions import ImproperlyConfigured
from tickwheel.django.project import ProjectScheduler, database_url

for alias in ("default", "memory", "plain", "full"):
    print(database_url(alias))
for alias in ("unnamed", "dummy", "nothing"):
    try:
        database_url(alias)
    except ImproperlyConfigured as error:
        print(error)
for settings in ({"retnetion": 1}, {"url": "mysql://x"}, {"dispatch": True}):
    try:
        ProjectScheduler(settings)
    except ImproperlyConfigured as error:
        print(error)
print(ProjectScheduler({"url": "memory://", "threads": 2}).database)
print(ProjectScheduler({"coordinator": "zookeeper://zoo/tasks"}).database)
"""
    lines = project.script(text).splitlines()
    assert lines[:4] == [
        f"sqlite:///{tmp_path}/a%20b/tickwheel.db",
        "memory://",
        "postgresql:///shop?",
        "postgresql://u%40x:p%2Fw@/shop?sslrootcert=%2Fmy%20certs%2Fca&host=%2Frun%2Fpg&port=5433",
    ]
    assert lines[4:6] == [
        f"TICKWHEEL needs a \"url\": DATABASES['{alias}'] names no database on SQLite or PostgreSQL"
        for alias in ("unnamed", "dummy")
    ]
    assert lines[6] == "TICKWHEEL names a database 'nothing' that DATABASES lacks"
    assert all(line.startswith("TICKWHEEL in the settings: ") for line in lines[7:10])
    assert "retnetion" in lines[7]
    assert lines[10:] == ["None", "default"]
