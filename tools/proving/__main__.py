"""Write `devicemap/compile/forms.json`: `python -m proving`, in `tests/`.

With names of families, tell of these and write nothing; with `--write`, too, change what the list says of the forms that they
try. With `--and`, take from the list what fails with this TensorFlow, and add what is right whose attributes the TensorFlow of
the list does not have.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from devicemap.compile.forms import LIST, Form, unpack
from proving.families import ALIKE, FAMILIES
from proving.listing import pack
from proving.trials import Trial, batches, outcomes

_PORTION = 150  # trials in one function: more take longer to build than they save
_PATIENCE_SECONDS = 1200


def main() -> None:
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if "--json" in sys.argv:  # one family, in a process of its own: a kernel that crashes proves nothing of the others
        print(json.dumps(_of_family(names[0])))
        return
    start, found = time.perf_counter(), {}
    for name in names or FAMILIES:
        of_family = {Form(*form): (same, gradients) for *form, same, gradients in _in_a_process(name)}
        found |= of_family
        right = [gradients for same, gradients in of_family.values() if same]
        told = f"{name}: {len(right)} forms proven, {sum(right)} with gradients; {len(of_family) - len(right)} are not"
        print(f"{told} ({time.perf_counter() - start:.0f} s)", flush=True)
        if names:
            print("\n".join(f"   not: {form}" for form, (same, _) in of_family.items() if not same))
    if not names or {"--write", "--and"} & {*sys.argv}:
        found = complete(found)
        proven = {form: gradients for form, (same, gradients) in found.items() if same}
        versions = [tf.__version__]
        if names or "--and" in sys.argv:
            before = json.loads(LIST.read_text())
            kept, versions = _forms_in(before), before["tensorflow"]
            if "--and" in sys.argv:
                known = {_names(form) for form in kept}
                proven = {
                    form: gradients and kept.get(form, True)
                    for form, gradients in proven.items()
                    if form in kept or _names(form) not in known
                }
                versions = sorted({*versions, tf.__version__})
            proven |= {form: gradients for form, gradients in kept.items() if form not in found}
        LIST.write_text(json.dumps(pack(proven, versions), indent=0, sort_keys=True) + "\n")
        print(f"{len(proven)} forms in {LIST.name}; {sum(not same for same, _ in found.values())} are not right")


def _forms_in(data: dict[str, Any]) -> dict[Form, bool]:
    """What a list holds, and whether the gradients are right, too."""
    return {
        Form(op, attributes, each): each in with_gradients
        for (op, attributes), (inputs, with_gradients) in unpack(data).items()
        for each in inputs
    }


def _names(form: Form) -> tuple[str, ...]:
    """Of an op and its attributes, which TensorFlows do not all have."""
    return (form.op, *(attribute.partition("=")[0] for attribute in form.attributes.split()))


def _in_a_process(name: str) -> list[list[str]]:
    command = [sys.executable, "-m", "proving", "--json", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return _nothing(f"{name}: no end after {_PATIENCE_SECONDS} s: nothing is proven")
    if done.returncode:
        return _nothing(f"{name}: ended with {done.returncode}: nothing is proven\n{done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _nothing(why: str) -> list[list[str]]:
    if "--and" in sys.argv:
        sys.exit(why)  # what the list has of it would stay
    print(why)
    return []


def _of_family(name: str) -> list[list[object]]:
    found = _outcomes(list(FAMILIES[name]()))
    return [[form.op, form.attributes, form.inputs, same, gradients] for form, (same, gradients) in found.items()]


def _outcomes(trials: list[Trial]) -> dict[Form, tuple[bool, bool]]:
    found: dict[Form, tuple[bool, bool]] = {}
    for portion in batches(trials, _PORTION):
        for form, (same, gradients) in outcomes(portion).items():
            before = found.get(form, (True, True))
            found[form] = (before[0] and same, before[1] and gradients)
    return found


_DTYPE = re.compile(r"\b(T|SrcT|DstT|Tparams|element_dtype|TI)=(\w+)")


def complete(found: dict[Form, tuple[bool, bool]]) -> dict[Form, tuple[bool, bool]]:
    """With the forms that were tried with another dtype alone, or for an op of the same rule, where all others are right."""
    by_rule: dict[tuple[str, str], dict[str, tuple[bool, bool]]] = {}
    for form, outcome in found.items():
        by_rule.setdefault((form.op, form.attributes), {})[form.inputs] = outcome
    completed = dict(found)
    for (op, attributes), tried in by_rule.items():
        every = by_rule.get(_standing_for(op, attributes), {})
        alike = all(same or not every.get(inputs, (False, False))[0] for inputs, (same, _) in tried.items())
        if alike and any(same for same, _ in tried.values()):
            gradients = all(also for same, also in tried.values() if same)
            for inputs, outcome in every.items():
                completed.setdefault(Form(op, attributes, inputs), (outcome[0], outcome[1] and gradients))
    return completed


def _standing_for(op: str, attributes: str) -> tuple[str, str]:
    """What was tried in every form with the same rule."""
    if op == "Cast":
        return op, "SrcT=int32 DstT=float32 Truncate=False"
    if op in ALIKE:
        return ALIKE[op], {
            "Neg": "T=float32",
            "AddV2": "T=float32",
            "Equal": "T=float32 incompatible_shape_error=True",
        }[ALIKE[op]]
    return op, _DTYPE.sub(lambda match: f"{match[1]}={'float32' if match[1] != 'TI' else match[2]}", attributes)


if __name__ == "__main__":
    main()
