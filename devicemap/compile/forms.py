"""The forms of ops that vectorise right: an allow list, `forms.json`, which `tools/proving` writes.

A form is a type of op with what decides how it vectorises: its attributes, the dtypes, ranks and kinds of axes of its
inputs, and which of these differ between rows (stacked). It is on the list if every trial gave what the op gives for each row
by itself, for no row, one, two and many; and, marked apart, the same gradients. Two kinds are on it by a rule: a form that was
tried in full with float32 alone, where the other dtype was right in a sample, and an op of one rule of TensorFlow's
(`ALIKE` in `tools/proving`), where it was right in a sample, and one op of that rule in full. All others run row by row.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

LIST = Path(__file__).with_name("forms.json")

_FLOW = frozenset(
    "PartitionedCall StatefulPartitionedCall While StatelessWhile If StatelessIf Case StatelessCase".split()
)
"""What holds ops rather than being one; those that it holds are looked up."""

_PARAMETERS = frozenset(
    "axis axes dim dims dimension reduction_indices perm multiples paddings begin end strides size size_splits split_dim shape "
    "depth num_segments k shift num_bits block_shape crops fft_length num_lower num_upper concat_dim element_shape".split()
)
"""Names of inputs that say how to compute, where they are known before it runs."""

_IGNORED = frozenset("message container shared_name output_shapes element_shape N num_split seed seed2".split())
"""Attributes that do not matter."""


@dataclass(frozen=True)
class Form:
    """What a form is on the list by."""

    op: str
    """The type of the op."""

    attributes: str
    """Its attributes, as far as they matter."""

    inputs: str
    """Its inputs: `s2` is stacked and of rank 2 for one row, `u0` a number that all rows share, `c1-` a list of axes of which
    some count from the end, or of lengths of which some are not known; `v1` such a list that is only known when it runs.
    Behind the rank: `z` no elements, `1` an axis of length 1, `?` lengths that are not known."""


def form_of(op: Any, stacked: Sequence[bool]) -> Form:
    """The form of an op (`tf.Operation`) of a function of one row, of which some inputs are `stacked`."""
    attributes = []
    for definition in op.op_def.attr:
        text = None if definition.name in _IGNORED else _attribute(definition, op.get_attr(definition.name))
        if text is not None:
            attributes.append(f"{definition.name}={text}")
    inputs, at = [], 0
    for argument in op.op_def.input_arg:
        several = bool(argument.number_attr or argument.type_list_attr)
        count = _length(op, argument) if several else 1
        parts = [
            _input(op.inputs[i], stacked[i], argument.name in _PARAMETERS)
            for i in range(at, min(at + count, len(stacked)))
        ]
        inputs.append("+".join(sorted({*parts})) if several else parts[0])
        at += count
    return Form(op.type, " ".join(attributes), " ".join(inputs))


def is_flow(op: Any) -> bool:
    """Whether an op is a call, a loop or a branch."""
    return op.type in _FLOW


def is_proven(form: Form, differentiable: bool) -> bool:
    """Whether a form is on the list; `differentiable`: with its gradients."""
    return form.inputs in _listed().get((form.op, form.attributes), (frozenset(), frozenset()))[differentiable]


def why_unproven(form: Form, names: Sequence[str]) -> str:
    """What tells a form that is not on the list from the most similar one of its op that is, in words.

    `names` are those of the op's inputs.
    """
    near = [
        (attributes, inputs)
        for (op, attributes), (listed, _) in _listed().items()
        if op == form.op
        for inputs in listed
    ]
    if not near:
        return f"{form.op} is not proven to give the same vectorised, whatever it is given"
    own = [*form.attributes.split(" "), *(f"{name} {part}" for name, part in zip(names, form.inputs.split(" ")))]

    def others(listed: tuple[str, str]) -> list[str]:
        known = {*listed[0].split(" "), *(f"{name} {part}" for name, part in zip(names, listed[1].split(" ")))}
        return [each for each in own if each not in known]

    fewest = min(map(others, sorted(near)), key=len)
    return f"{form.op} is not proven to give the same vectorised where {' and '.join(map(_in_words, fewest))}"


def _in_words(part: str) -> str:
    """An attribute as it is, and an input with what its code says.

    >>> _in_words("keep_dims=False"), _in_words("filter u41")
    ('keep_dims=False', 'filter is the same for all rows, of rank 4, with an axis of length 1')
    """
    name, _, codes = part.partition(" ")
    return f"{name} is {' or '.join(map(_input_in_words, codes.split('+')))}" if codes else name


def _input_in_words(code: str) -> str:
    kind, rank, flags = code[0], code[1], code[2:]
    return ", ".join(
        [_KINDS[kind], f"of {'unknown rank' if rank == '?' else f'rank {rank}'}", *(_FLAGS[f] for f in flags)]
    )


_KINDS = {
    "s": "another one for each row",
    "u": "the same for all rows",
    "c": "known before it runs",
    "v": "known when it runs",
}
_FLAGS = {
    "z": "without elements",
    "1": "with an axis of length 1",
    "?": "with an unknown length",
    "-": "with numbers below 0",
}


def unpack(packed: dict[str, Any]) -> dict[tuple[str, str], tuple[frozenset[str], frozenset[str]]]:
    """Op and attributes -> the inputs that it vectorises right, and those for which it has its gradients, too."""
    patterns = [frozenset(each.split(" , ")) - {""} for each in packed["inputs"]]
    return {
        (op, attributes): (patterns[values], patterns[gradients])
        for op, entries in packed["ops"].items()
        for attributes, values, gradients in entries
    }


@functools.cache
def _listed() -> dict[tuple[str, str], tuple[frozenset[str], frozenset[str]]]:
    return unpack(json.loads(LIST.read_text()))


def _length(op: Any, argument: Any) -> int:
    value = op.get_attr(argument.number_attr or argument.type_list_attr)
    return value if isinstance(value, int) else len(value)


def _attribute(definition: Any, value: Any) -> str | None:
    if definition.type == "type":
        return str(value.name)
    if definition.type == "list(type)":
        return "+".join(sorted({each.name for each in value}))
    if definition.type == "bool":
        return str(value)
    if definition.type == "int":
        return _sign(value)
    if definition.type == "list(int)":
        return (
            "ones" if value and all(each == 1 for each in value) else "".join(sorted({_sign(each) for each in value}))
        )
    if definition.type == "string":
        text = value.decode() if isinstance(value, bytes) else str(value)
        return _equation(text) if definition.name == "equation" else text
    return None  # floats, shapes, tensors and functions


def _equation(text: str) -> str:
    """How an Einsum works: what its letters are does not matter."""
    left, _, result = text.partition("->")
    inputs = left.split(",")
    repeated = any(len({*each}) < len(each.replace(".", "")) for each in [*map(str.strip, inputs), result])
    return f"{len(inputs)}{' ellipsis' * ('.' in text)}{' repeated' * repeated}"


def _sign(number: int) -> str:
    return "-" if number < 0 else "+" if number else "0"


def _input(tensor: Any, stacked: bool, parameter: bool) -> str:
    shape = tensor.shape
    rank = "?" if shape.rank is None else str(shape.rank)
    if parameter and not stacked:
        value = tf.get_static_value(tensor)
        if value is None:
            return f"v{rank}"
        flat = [int(each) for each in value.ravel()]
        return f"c{rank}{'-' * any(each < 0 for each in flat)}{'z' * (not flat)}"
    lengths = [] if shape.rank is None else shape.as_list()
    flags = ("z" * (0 in lengths), "1" * (1 in lengths), "?" * (None in lengths))
    return f"{'s' if stacked else 'u'}{rank}{''.join(flags)}"
