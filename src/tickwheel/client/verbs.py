"""How a function that makes a `Call` becomes a method of a client: signature, docstring, name."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")
K = TypeVar("K", bound=type)

THROUGH_PAGES = """Go through every page of a list, and give its items one by one.

The options are the list's: `limit` is how many are asked for at once. What is added meanwhile may
be left out.
"""


def told_by(call: Callable[..., Any], method: F) -> F:
    """Give a method the docstring and the signature of the function that it stands for."""
    method.__doc__ = call.__doc__
    method.__signature__ = signature_of(call)  # type: ignore[attr-defined]
    return method


def told_as_pages(call: Callable[..., Any], method: F, iterator: str) -> F:
    """Do the same for a method that goes through the pages that the function asks for."""
    method.__doc__ = THROUGH_PAGES
    signature = signature_of(call)
    item = signature.return_annotation.removeprefix("Page")
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        return_annotation=f"{iterator}{item}"
    )
    return method


def signature_of(call: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function that returns a `Call`, as a method that returns its T."""
    signature = inspect.signature(call)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    returned = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    parameters = [itself, *signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=returned)


def with_names(kind: K) -> K:
    """Name the verbs of a client as the class calls them."""
    for name, verb in vars(kind).items():
        if isinstance(verb, FunctionType) and verb.__name__ == "verb":
            verb.__name__ = name
            verb.__qualname__ = f"{kind.__name__}.{name}"
    return kind
