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
    """List the nodes of the cluster."""


@nodes.command("list", epilog=examples("tickwheel nodes list"))
@with_output
@with_client
def list_nodes(*, client: Client, out: Output) -> None:
    """List the known nodes, by name, and how many shards each owns."""
    out.items(client.nodes(), ("name", "shards", "started_at", "lease_until"))


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
