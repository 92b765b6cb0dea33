"""The configuration of the Django app: it imports the `tasks` module of every installed app."""

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class TickwheelConfig(AppConfig):  # type: ignore[misc]
    """The app "tickwheel.django"."""

    name = "tickwheel.django"
    label = "tickwheel"
    verbose_name = "tickwheel"
    default_auto_field = "django.db.models.AutoField"

    def ready(self) -> None:
        """Register the task functions of the project; this starts nothing."""
        autodiscover_modules("tasks")
