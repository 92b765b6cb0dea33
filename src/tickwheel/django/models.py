"""A model without a table: the admin and Django's permissions know tasks by it."""

from __future__ import annotations

from typing import Any

from django.db import models


class NoRows(models.Manager):  # type: ignore[misc]
    """Finds nothing, without a query: `dumpdata` reads every model."""

    def get_queryset(self) -> Any:
        """Return the empty set."""
        return super().get_queryset().none()


class Task(models.Model):  # type: ignore[misc]
    """A durable task; the scheduler has it, not Django's ORM."""

    objects = NoRows()

    class Meta:  # noqa: D106
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view", "change")
