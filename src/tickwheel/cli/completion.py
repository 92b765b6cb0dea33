"""`completion`: the script with which a shell completes commands, options and names."""

from __future__ import annotations

import click

from tickwheel.cli.output import examples


@click.command(
    epilog=examples(
        """echo 'eval "$(tickwheel completion bash)"' >> ~/.bashrc""",
        """echo 'eval "$(tickwheel completion zsh)"' >> ~/.zshrc""",
        "tickwheel completion fish > ~/.config/fish/completions/tickwheel.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a shell's completion script.

    Names of services and schedules are also completed if TICKWHEEL_SERVER can be reached.
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415 - only for this command

    found = get_completion_class(shell)
    assert found is not None, shell
    root = ctx.find_root().command
    click.echo(found(root, {}, "tickwheel", "_TICKWHEEL_COMPLETE").source())
