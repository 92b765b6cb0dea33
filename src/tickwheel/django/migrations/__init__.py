"""Django's migrations: they create no table, only the permissions of the admin page."""
