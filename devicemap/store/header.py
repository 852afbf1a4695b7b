"""What the results in a folder are results of, and what tells one call, and one function, from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Header:
    """What the results in a folder are results of. All but `name` must be the same when the folder is used again."""

    results: Any
    """The nest of the results' specs, as `encoding.describe_nest` writes it."""

    inputs: Any
    """The nest of the data's specs, written the same way."""

    batched: bool
    """The option."""

    batch_size: int | str | None
    """The option."""

    chunk_rows: int | None
    """Rows of the first chunk, where the data decides that: a dataset of batches without `batch_size`."""

    seed: int | None
    """The option."""

    rows: int | None
    """How many rows the data has, `None` where nobody knew when the call began."""

    function: Mapping[str, Any]
    """What the function is, as `fingerprint.fingerprint` writes it."""

    name: str
    """The name of the function, to tell people."""

    reducer: Sequence[str] | None = None
    """How results are reduced, by leaf: each chunk is one state, whatever its rows. `None`: a chunk has a result for each."""


def other_call(there: Header, here: Header) -> list[str]:
    """What one call differs from another one in, in words, besides the function."""
    names = [field.name for field in fields(Header) if field.name not in ("function", "name")]
    return _changed({name: getattr(there, name) for name in names}, {name: getattr(here, name) for name in names})


def other_function(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What one fingerprint differs from another one in, in words. The version of TensorFlow alone is no difference.

    >>> other_function({"graph": "a", "parts": ["1 x Mul"]}, {"graph": "b", "parts": ["1 x Add"]})
    ['1 x Mul there, 1 x Add now']
    """
    apart = ("graph", "variables", "parts", "tensorflow")
    found = _changed(there, {name: value for name, value in here.items() if name not in apart})
    if there.get("graph") != here["graph"]:
        old = there.get("parts")
        was, now = [*map(str, old)] if isinstance(old, list) else [], here["parts"]
        gone, new = ([part for part in one if part not in other] for one, other in ((was, {*now}), (now, {*was})))
        text = (
            f"{listed(gone)} there, {listed(new)} now" if gone or new else "the same ops, put together in another way"
        )
        if there.get("tensorflow") != here.get("tensorflow"):
            text += f" (traced by TensorFlow {there.get('tensorflow')!s:.20} there)"
        found.append(text)
    return found


def _changed(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} was {there.get(name)!r:.500} there, and is {value!r:.500} now"
        for name, value in here.items()
        if there.get(name) != value
    ]


def listed(parts: Sequence[str]) -> str:
    """The first three of these in words, and how many more there are."""
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return ", ".join(f"{part:.150}" for part in parts[:3]) + more or "nothing of it"
