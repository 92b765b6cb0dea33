"""The page of the admin: tasks and the backlog, a task's attempts; cancel, run now, replay.

Permission "view" shows tasks, "change" acts on them. Every act is in the store's audit log.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import path, reverse

from tickwheel.django import models
from tickwheel.django.project import scheduler
from tickwheel.errors import TickwheelError
from tickwheel.values.outcome import error_line
from tickwheel.values.task import State

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tickwheel.durable.blocking import Blocking
    from tickwheel.values.task import Page, Task

PAGE_TASKS = 100
MAX_ERROR = 200  # characters of an error in the list
FILTERS = ("state", "service", "key", "tag")
ACTIONS = {"cancel": "Cancel", "run": "Run now", "replay": "Replay"}


@admin.register(models.Task)
class TaskAdmin(admin.ModelAdmin):  # type: ignore[misc]
    """The tasks of the project's scheduler; nothing is read by Django's ORM."""

    def get_urls(self) -> list[Any]:
        """Return the two pages; the others of a model would read its table."""
        view = self.admin_site.admin_view
        return [
            path("", view(self.changelist_view), name="tickwheel_task_changelist"),
            path("<str:object_id>/change/", view(self.change_view), name="tickwheel_task_change"),
        ]

    def has_add_permission(self, _: HttpRequest) -> bool:
        """Return False: a program submits tasks."""
        return False

    def has_delete_permission(self, _: HttpRequest, __: Any = None) -> bool:
        """Return False: a task is cancelled, and stays in the backlog."""
        return False

    def changelist_view(self, request: HttpRequest) -> HttpResponse:
        """List tasks, newest first; a POST acts on those that were chosen."""
        self._require("view", request)
        if request.method == "POST":
            return self._act(request, request.POST.getlist("task"))
        given = {name: request.GET.get(name, "").strip() for name in FILTERS}
        wanted = {name: value for name, value in given.items() if value}
        tasks, following = [], None
        try:
            page = find(scheduler.started(), wanted, request.GET.get("cursor"))
            tasks = [(task, error_line(task.error or "")[:MAX_ERROR]) for task in page.items]
            if page.next_cursor is not None:
                following = urlencode({**wanted, "cursor": page.next_cursor})
        except (TickwheelError, ValueError) as error:  # a wrong filter, or no store
            messages.error(request, str(error))
        return self._page(
            request, "change_list", "Tasks", tasks=tasks, given=given, states=[*State],
            following=following, limited=following is not None and len(tasks) < PAGE_TASKS,
        )  # fmt: skip

    def change_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show a task and its attempts; a POST acts on it."""
        self._require("view", request)
        if request.method == "POST":
            return self._act(request, [object_id])
        try:
            verbs = scheduler.started()
            try:
                task = verbs.get(object_id)
            except (LookupError, ValueError):
                raise Http404(f"no task has the id {object_id}") from None
            rows, more = verbs.attempts_page(task.id, limit=PAGE_TASKS)
        except TickwheelError as error:  # no store, or the task was pruned just now
            messages.error(request, str(error))
            site = self.admin_site.name
            return redirect(reverse("admin:tickwheel_task_changelist", current_app=site))
        return self._page(
            request, "change_form", f"Task {task.id}", task=task, attempts=rows,
            more=more is not None, payload=pretty(task.payload),
            result=None if task.result_body is None else pretty(task.result),
            actions={name: ACTIONS[name] for name in possible_actions(task)},
        )  # fmt: skip

    def _require(self, permission: str, request: HttpRequest) -> None:
        allowed = {"view": self.has_view_permission, "change": self.has_change_permission}
        if not allowed[permission](request):
            raise PermissionDenied

    def _act(self, request: HttpRequest, ids: list[str]) -> HttpResponse:
        """Act on tasks as the form says, report how it went, and show the same page again."""
        self._require("change", request)
        action = request.POST.get("action", "")
        if action not in ACTIONS or not ids:
            messages.warning(request, "Choose tasks and an action.")
            return redirect(request.get_full_path())
        done = []
        for task_id in ids[:PAGE_TASKS]:
            try:
                refused = act(scheduler.started(), action, task_id)
            except (TickwheelError, ValueError) as error:
                refused = str(error)
            if refused:
                messages.error(request, f"{task_id}: {refused}")
            else:
                done.append(task_id)
        if done:
            messages.success(request, f"{ACTIONS[action]}: {len(done)}")
            actor = f"django:{request.user.get_username()}"
            try:
                for task_id in done:
                    scheduler.started().note(f"task.{action}", task_id, actor=actor)
            except TickwheelError as error:
                messages.error(request, f"not in the audit log: {error}")
        return redirect(request.get_full_path())

    def _page(self, request: HttpRequest, name: str, title: str, **found: Any) -> HttpResponse:
        site = self.admin_site.each_context(request)
        context = {
            **site, "title": title, "opts": self.opts, "actions": ACTIONS,
            "may_act": self.has_change_permission(request), **found,
        }  # fmt: skip
        return TemplateResponse(request, f"admin/tickwheel/task/{name}.html", context)


def find(verbs: Blocking, wanted: Mapping[str, str], cursor: str | None) -> Page:
    """Return a page of tasks, live and final."""
    state = State(wanted["state"]) if "state" in wanted else None
    return verbs.list(
        state=state, service=wanted.get("service"), key=wanted.get("key"),
        tag=wanted["tag"].split() if "tag" in wanted else None, cursor=cursor, limit=PAGE_TASKS,
    )  # fmt: skip


def act(verbs: Blocking, action: str, task_id: str) -> str | None:
    """Act on a task; return why that was not possible, or None."""
    if action == "replay":
        verbs.replay(task_id)
        return None
    verdict = verbs.cancel(task_id) if action == "cancel" else verbs.reschedule(task_id, delay=0)
    return None if verdict.won else f"the task is {verdict.state}"


def possible_actions(task: Task) -> list[str]:
    """Return the actions that a task's state allows."""
    if task.final:
        return ["replay"] if task.replayed_as is None else []
    return [] if task.state is State.RUNNING else ["cancel", "run"]


def pretty(value: Any) -> str:
    """Return a payload or a result as indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)
