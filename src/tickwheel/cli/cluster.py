"""`nodes`, `shards` and `audit`: the cluster's nodes, its shards and its audit log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tickwheel.cli.output import Output, examples, with_output
from tickwheel.cli.remote import iterate_pages, page_options, with_client

if TYPE_CHECKING:
    from tickwheel.client import Client


@click.group()
def nodes() -> None:
    """List and drain the nodes of the cluster."""


@nodes.command("list", epilog=examples("tickwheel nodes list"))
@with_output
@with_client
def list_nodes(*, client: Client, out: Output) -> None:
    """List the known nodes, by name, and how many shards each owns.

    A draining node gives up its shards; a drained one has none. A node is unregistered if it owns
    shards and is not alive: the others are about to take them.
    """
    out.items(
        client.nodes(),
        ("name", "state", "shards", "weight", "address", "version", "started_at", "lease_until"),
    )


@nodes.command(
    epilog=examples("tickwheel nodes drain node-2", "tickwheel nodes drain node-2 --undo")
)
@click.argument("name")
@click.option("--undo", is_flag=True, help="Let the node have shards again.")
@with_output
@with_client
def drain(*, client: Client, out: Output, name: str, undo: bool) -> None:
    """Move the shards of a node to the others, for example before maintenance.

    The node finishes its calls, and goes on answering requests. This holds until --undo, or until
    its process ends. If no other node can take the shards, the exit code is 4.
    """
    if undo:
        client.undrain_node(name)
        out.result({"active": name}, f"{name} is active")
    else:
        client.drain_node(name)
        out.result({"draining": name}, f"{name} is draining")


@click.command(epilog=examples("tickwheel shards", "tickwheel shards --json | jq .owner"))
@with_output
@with_client
def shards(*, client: Client, out: Output) -> None:
    """List the shards and their owners."""
    out.items(client.shards(), ("shard", "owner", "epoch"))


@click.command(epilog=examples("tickwheel audit --limit 20", "tickwheel audit --all --json"))
@page_options
@with_output
@with_client
def audit(*, client: Client, out: Output, limit: int | None, cursor: str | None) -> None:
    """List the audit log, newest first.

    This needs a token with the scope admin.
    """
    out.items(
        iterate_pages(client.audit, limit, cursor),
        ("at", "actor", "namespace", "action", "target", "request", "detail"),
    )
