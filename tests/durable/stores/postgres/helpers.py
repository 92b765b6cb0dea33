"""Helpers of the tests of the store on PostgreSQL."""


async def lock(user, task):
    """Have a transaction of the user's lock a task, until it ends."""
    await user.execute(f"BEGIN; SELECT 1 FROM task WHERE id = '{task.id}' FOR UPDATE")


def dies(*_, **__):
    raise ConnectionResetError("the connection was cut")


async def backend(connection):
    return (await connection.fetch("SELECT pg_backend_pid()"))[0][0]
