"""Nests of tuples, dicts and objects of the user's classes, as `tf.nest` goes into them.

A list is a leaf, which becomes a tensor. It is structure in `fn_output_signature` and, where that has a list, in results.

TensorFlow knows three kinds of classes whose objects are structure: those of `attrs`, those with `__tf_flatten__` and
`__tf_unflatten__`, and extension types. The first two may refuse to hold anything else than tensors (specs, for instance),
and `tf.nest` takes the third for leaves. So each object becomes a `Node` where it comes in, and an object again where `fn`
gets it and where results are handed out; in between there are nodes only, which hold anything.
"""

from __future__ import annotations

import typing
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf


@dataclass(frozen=True, eq=False, repr=False)
class Node:
    """An object of a user's class, taken apart; `tf.nest` goes into its parts."""

    kind: Any
    """The class; `list` for a list of results; `None` for a value that is no tensor, in an extension type."""

    static: Any
    """What the object has besides its parts: the same for all rows, and never changed."""

    names: tuple[Any, ...]
    """Of the parts: names of fields, keys or indices."""

    parts: tuple[Any, ...]
    """Nests."""

    def __tf_flatten__(self) -> tuple[Any, tuple[Any, ...]]:
        return (self.kind, self.static, self.names), self.parts

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: tuple[Any, ...]) -> Node:
        kind, static, names = metadata
        return cls(kind, static, names, components)

    def __repr__(self) -> str:
        if self.kind is None:
            return repr(self.static)
        if self.kind is list:
            return repr(list(self.parts))
        return f"{self.kind.__name__}({', '.join(f'{name}={part!r}' for name, part in zip(self.names, self.parts))})"

    @property
    def key(self) -> Any:
        """What tells objects apart besides their parts; hashable, if what they are made of is."""
        return (
            self.kind,
            freeze(self.static, lambda leaf: (type(leaf), leaf)),
            self.names,
        )  # with types: 1 equals True


def map_nest(
    leaf: Callable[[Any, str], Any],
    data: Any,
    path: str = "",
    build: Callable[[Node], Any] = lambda node: node,
    lists: Callable[[str], bool] = lambda path: False,
) -> Any:
    """Rebuild tuples (named ones too) and dicts, and objects as nodes, with `leaf(value, path)` for everything else.

    `path` is that of `data`, where `leaf` needs one; `build` makes of a node, with the new parts, what takes its place.
    `lists` decides by its path whether a list becomes a node; other lists are leaves.
    """

    def rebuilt(value: Any, path: str) -> Any:
        return map_nest(leaf, value, path, build, lists)

    if isinstance(data, Mapping):
        entries = {key: rebuilt(value, f"{path}[{key!r}]") for key, value in data.items()}
        return OrderedDict(entries) if isinstance(data, OrderedDict) else entries
    if isinstance(data, tuple):
        if hasattr(data, "_fields"):
            return type(data)(*(rebuilt(v, f"{path}.{f}") for f, v in zip(data._fields, data)))
        return tuple(rebuilt(value, f"{path}[{i}]") for i, value in enumerate(data))
    if isinstance(data, list) and lists(path):
        node: Node | None = Node(list, None, tuple(range(len(data))), tuple(data))
    else:
        node = _node_of(data)
    if node is None:
        return leaf(data, path)
    return build(replace(node, parts=tuple(rebuilt(p, path + _step(node, n)) for n, p in zip(node.names, node.parts))))


def as_nodes(data: Any, lists: Callable[[str], bool] = lambda path: False) -> Any:
    """The nest with nodes in place of objects, and of the lists that `lists` chooses by their paths."""
    return map_nest(lambda leaf, _: leaf, data, lists=lists)


def paths_of_lists(nest: Any, path: str) -> frozenset[str]:
    """The paths of all lists in the nest, whose own path is `path`."""
    found: list[str] = []

    def noted(path: str) -> bool:
        found.append(path)
        return True

    map_nest(lambda leaf, _: leaf, nest, path, lists=noted)
    return frozenset(found)


def as_objects(nest: Any) -> Any:
    """The nest of tensors with objects in place of their nodes. What an extension type validates is not asked here."""
    return map_nest(lambda leaf, _: leaf, nest, build=_object_of)


def tuples_for_lists(nest: Any) -> Any:
    """The nest with tuples in place of the nodes of lists: datasets and files have no lists."""
    return map_nest(lambda leaf, _: leaf, nest, build=lambda node: node.parts if node.kind is list else node)


def refused_by(nest: Any) -> tuple[Node, Exception] | None:
    """The first node in the nest of tensors whose extension type's `__validate__` raises for it, and what it raises."""
    refused: list[tuple[Node, Exception]] = []

    def validated(node: Node) -> Any:
        made = _object_of(node)
        if isinstance(made, tf.experimental.ExtensionType):
            try:
                made.__validate__()
            except Exception as error:  # whatever the class raises
                refused.append((node, error))
        return made

    map_nest(lambda leaf, _: leaf, nest, build=validated)
    return refused[0] if refused else None


def nodes_of(nest: Any) -> list[Node]:
    """The nodes in the nest, at any depth."""
    found: list[Node] = []

    def noted(node: Node) -> Node:
        found.append(node)
        return node

    map_nest(lambda leaf, _: leaf, nest, build=noted)
    return found


def check_same_structure(one: Any, other: Any) -> None:
    """Raise `TypeError` or `ValueError` unless the nests, with nodes for objects, differ in their leaves alone."""
    tf.nest.assert_same_structure(one, other)
    for node, another in zip(nodes_of(one), nodes_of(other)):
        if node.key != another.key:
            raise ValueError(f"{node!r} and {another!r} differ besides their tensors")


def freeze(value: Any, leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A hashable stand-in for a nest: equal for nests of the same structure and leaves, or what `leaf` makes of them."""
    if isinstance(value, Mapping):
        entries = sorted(value.items(), key=lambda entry: str(entry[0]))
        return (type(value), *((key, freeze(entry, leaf)) for key, entry in entries))
    if isinstance(value, tuple | list):
        return (type(value), *(freeze(entry, leaf) for entry in value))
    if isinstance(value, Node):
        return (Node, value.key, *(freeze(part, leaf) for part in value.parts))
    return leaf(value)


def _node_of(data: Any) -> Node | None:
    """An object as a node, whose parts are as the object has them; `None` for everything else."""
    if isinstance(data, Node):
        return data
    if _is_attrs(type(data)):
        names = tuple(attribute.name for attribute in type(data).__attrs_attrs__)
        return Node(type(data), None, names, tuple(getattr(data, name) for name in names))
    kind = getattr(data, "value_type", None) if isinstance(data, tf.TypeSpec) else type(data)
    if isinstance(kind, type) and issubclass(kind, tf.experimental.ExtensionType):
        names = tuple(typing.get_type_hints(kind))  # as TensorFlow finds the fields
        return Node(kind, None, names, tuple(_field(getattr(data, name)) for name in names))
    if not isinstance(data, type) and hasattr(data, "__tf_flatten__") and hasattr(data, "__tf_unflatten__"):
        static, parts = data.__tf_flatten__()
        return Node(type(data), static, tuple(range(len(parts))), tuple(parts))
    return None


def _field(value: Any) -> Any:
    """What an extension type holds, with what is no tensor in nodes of its own."""
    if isinstance(value, Mapping):
        return Node(type(value), None, tuple(value), tuple(map(_field, value.values())))
    if isinstance(value, tuple):
        return tuple(map(_field, value))
    holds_tensors = tf.is_tensor(value) or isinstance(value, tf.TypeSpec | tf.experimental.ExtensionType)
    return value if holds_tensors else Node(None, value, (), ())


def _object_of(node: Node) -> Any:
    if node.kind is None:
        return node.static
    if node.kind is list:
        return list(node.parts)
    if issubclass(node.kind, Mapping):
        return node.kind(zip(node.names, node.parts))
    if _is_attrs(node.kind):
        return node.kind(*node.parts)
    if issubclass(node.kind, tf.experimental.ExtensionType):
        made = node.kind.__new__(node.kind)  # not by its constructor, which may take other arguments
        vars(made).update(zip(node.names, node.parts))
        return made
    return node.kind.__tf_unflatten__(node.static, node.parts)


def _is_attrs(kind: Any) -> bool:
    return hasattr(kind, "__attrs_attrs__")


def _step(node: Node, name: Any) -> str:
    """From a node to its part, in a path."""
    return f".{name}" if isinstance(name, str) and not issubclass(node.kind, Mapping) else f"[{name!r}]"
