"""The model without a table."""

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]
    """Creates nothing in the database; permissions are made for the model."""

    initial = True
    operations = [  # noqa: RUF012
        migrations.CreateModel(
            name="Task",
            fields=[
                (
                    "id",
                    models.AutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                )
            ],
            options={
                "managed": False,
                "base_manager_name": "objects",
                "default_permissions": ("view", "change"),
            },
        )
    ]
