"""`nodes`, `shards`, `audit`: who is there, who owns what, who changed what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tickwheel.cli.output import Output, examples, printing
from tickwheel.cli.remote import limits, paged, remote

if TYPE_CHECKING:
    from tickwheel.client import Client


@click.group()
def nodes() -> None:
    """List the nodes of the cluster."""


@nodes.command("list", epilog=examples("tickwheel nodes list"))
@printing
@remote
def list_nodes(*, client: Client, out: Output) -> None:
    """List the nodes that are known, by name, and how many shards each owns."""
    out.items(client.nodes(), ("name", "shards", "started_at", "lease_until"))


@click.command(epilog=examples("tickwheel shards", "tickwheel shards --json | jq .owner"))
@printing
@remote
def shards(*, client: Client, out: Output) -> None:
    """List the shards and who owns them."""
    out.items(client.shards(), ("shard", "owner", "epoch"))


@click.command(epilog=examples("tickwheel audit --limit 20", "tickwheel audit --all --json"))
@limits
@printing
@remote
def audit(*, client: Client, out: Output, limit: int | None, cursor: str | None) -> None:
    """List who changed what, newest first.

    It needs a token with the scope admin.
    """
    out.items(
        paged(client.audit, limit, cursor),
        ("at", "actor", "namespace", "action", "target", "request", "detail"),
    )
