"""Everything devicemap uses of TensorFlow that is not public; each entry says why no public name serves.

Each is looked up when it is first used, and has a public way to fall back on where TensorFlow lacks it (`docs/internals.md`).
`tests/_tensorflow/test_internals.py` fails the day one of them goes; `make test-plain` runs the laws on the public ways.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any, TypeVar

private = True
"""Whether to use what TensorFlow does not document. False: its public interface alone, which gives the same answers, slower or
on fewer devices. Asked in each call, but traces are kept: it is to be set before the first one."""

CallableT = TypeVar("CallableT", bound=Callable[..., Any])


class Private:
    """A module of TensorFlow that is not public, imported when it is first used; its attributes are those of the module."""

    def __init__(self, module: str, *names: str):
        """`names`: all that is used of it, with dots for attributes of attributes."""
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._module), name)
        setattr(self, name, value)  # found without this the next time
        return value

    @functools.cached_property
    def is_there(self) -> bool:
        """Whether this TensorFlow has the module, and all of the names in it."""
        try:
            module = importlib.import_module(self._module)
            for name in self._names:
                operator.attrgetter(name)(module)
        except (ImportError, AttributeError):
            return False
        return True


def usable(*needed: Private) -> bool:
    """Whether something that is not public may be used, and all of it is there."""
    return private and all(each.is_there for each in needed)


def with_fallback(public: Callable[..., Any], *needed: Private) -> Callable[[CallableT], CallableT]:
    """Decorate a function that uses what is `needed` with the `public` way, called instead where that is not usable."""

    def decorate(function: CallableT) -> CallableT:
        @functools.wraps(function)
        def either(*args: Any, **kwargs: Any) -> Any:
            return (function if usable(*needed) else public)(*args, **kwargs)

        return either  # type: ignore[return-value]

    return decorate


def nothing(*_: Any) -> None:
    """The public way of what only makes things faster."""
