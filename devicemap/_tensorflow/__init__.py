"""The non-public names of TensorFlow and Keras that devicemap uses, each with its reason.

A name is looked up at its first use. Most have a public fallback; `docs/explanation/internals.md` lists them.
`tests/_tensorflow/test_internals.py` fails if a name is missing or behaves differently; `make test-plain` runs the laws without
these names.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any, TypeVar

private = True
"""Whether to use non-public names. Without them, results are the same, but slower or on fewer devices.

Set it before the first trace, because traces are kept."""

CallableT = TypeVar("CallableT", bound=Callable[..., Any])


class Private:
    """A module of TensorFlow with non-public names, imported at its first use; its attributes are those of the module."""

    def __init__(self, module: str, *names: str):
        """`names`: the used names, with dots for attributes of attributes."""
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._module), name)
        setattr(self, name, value)  # the next look-up does not call __getattr__
        return value

    @functools.cached_property
    def is_available(self) -> bool:
        """Whether this TensorFlow has the module and all names."""
        try:
            module = importlib.import_module(self._module)
            for name in self._names:
                operator.attrgetter(name)(module)
        except (ImportError, AttributeError):
            return False
        return True


def usable(*needed: Private) -> bool:
    """Whether non-public names may be used, and this TensorFlow has all that are `needed`."""
    return private and all(each.is_available for each in needed)


def with_fallback(public: Callable[..., Any], *needed: Private) -> Callable[[CallableT], CallableT]:
    """Decorate a function that uses the `needed` names. The `public` function replaces it if they are not usable."""

    def decorate(function: CallableT) -> CallableT:
        @functools.wraps(function)
        def either(*args: Any, **kwargs: Any) -> Any:
            return (function if usable(*needed) else public)(*args, **kwargs)

        return either  # type: ignore[return-value]

    return decorate


def nothing(*_: Any) -> None:
    """Do nothing: the fallback of functions that are optional."""
