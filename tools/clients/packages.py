"""The packages of others: imported, or their tests skipped with the reason."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest


def imported(name: str) -> Any:
    """The module, however much it warns. Whatever it raises skips the tests of the module that asks for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except Exception as error:
            pytest.skip(f"{name} cannot be imported: {type(error).__name__}: {error}", allow_module_level=True)
