"""Turn a function that returns a `Call` into a client's method: signature, docstring, name."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")
K = TypeVar("K", bound=type)

PAGES_DOC = """Iterate over the items of a list, page by page.

The options are those of the list; `limit` is the page size. Items added during the iteration may
be missing.
"""


def document_as(call: Callable[..., Any], method: F) -> F:
    """Give a method the docstring and signature of the function that it calls."""
    method.__doc__ = call.__doc__
    method.__signature__ = signature_of(call)  # type: ignore[attr-defined]
    return method


def document_as_pages(call: Callable[..., Any], method: F, iterator: str) -> F:
    """Give a method that iterates over a function's pages its docstring and signature."""
    method.__doc__ = PAGES_DOC
    signature = signature_of(call)
    item = signature.return_annotation.removeprefix("Page")
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        return_annotation=f"{iterator}{item}"
    )
    return method


def signature_of(call: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function returning `Call[T]`, as a method returning `T`."""
    signature = inspect.signature(call)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    returned = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
    parameters = [itself, *signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=returned)


def name_methods(kind: K) -> K:
    """Give each method of a client the name of its class attribute."""
    for name, verb in vars(kind).items():
        if isinstance(verb, FunctionType) and verb.__name__ == "verb":
            verb.__name__ = name
            verb.__qualname__ = f"{kind.__name__}.{name}"
    return kind
