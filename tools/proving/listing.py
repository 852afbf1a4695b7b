"""The format of `forms.json`, which `devicemap.compile.forms.unpack` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from devicemap.compile.forms import Form


def pack(proven: dict[Form, bool], versions: Sequence[str]) -> dict[str, Any]:
    """Return the content of `forms.json`; `proven` says for each form whether its gradients are right, too."""
    groups: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for form, gradients in proven.items():
        values, also = groups.setdefault((form.op, form.attributes), (set(), set()))
        values.add(form.inputs)
        if gradients:
            also.add(form.inputs)
    patterns: dict[tuple[str, ...], int] = {}
    ops: dict[str, list[Any]] = {}
    for (op, attributes), sets in sorted(groups.items()):
        numbers = [patterns.setdefault(tuple(sorted(inputs)), len(patterns)) for inputs in sets]
        ops.setdefault(op, []).append([attributes, *numbers])
    return {"tensorflow": list(versions), "inputs": [" , ".join(each) for each in patterns], "ops": ops}
