"""Nests of tuples, dicts and objects of the user's classes, with the structure of `tf.nest`.

A list is a leaf, which becomes a tensor. Lists in `fn_output_signature`, and in results at the same place, are structure.
TensorFlow treats three kinds of objects as structure: objects of `attrs` classes, objects with `__tf_flatten__` and
`__tf_unflatten__`, and extension types. The first two may refuse to hold anything but tensors (specs, for instance), and
`tf.nest` treats the third as leaves. So each object of the user becomes a `Node`, which holds any values. It becomes an object
again when it is passed to `fn` or returned to the user.
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
    """The parts of an object of a user's class. `tf.nest` flattens a node into the leaves of its parts."""

    kind: Any
    """The class; `list` for a list of results; `None` for a value in an extension type that is not a tensor."""

    static: Any
    """The metadata of the object, which is the same for all rows."""

    names: tuple[Any, ...]
    """The names of the parts: fields, keys or indices."""

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
        """A value of the node without its parts. It is hashable if the metadata is."""
        static = freeze(self.static, lambda leaf: (type(leaf), leaf))  # with types, because 1 equals True
        return self.kind, static, self.names


def map_nest(
    leaf: Callable[[Any, str], Any],
    data: Any,
    path: str = "",
    build: Callable[[Node], Any] = lambda node: node,
    lists: Callable[[str], bool] = lambda path: False,
) -> Any:
    """Replace each leaf of a nest by `leaf(value, path)`, and each object by a node.

    Args:
        leaf: function of a leaf and its path.
        data: nest of tuples (also named ones), dicts, objects and nodes.
        path: the path of `data`.
        build: function of a node with mapped parts that returns its replacement.
        lists: returns whether the list with this path becomes a node; other lists are leaves.
    """

    def mapped(value: Any, path: str) -> Any:
        return map_nest(leaf, value, path, build, lists)

    if isinstance(data, Mapping):
        entries = {key: mapped(value, f"{path}[{key!r}]") for key, value in data.items()}
        return OrderedDict(entries) if isinstance(data, OrderedDict) else entries
    if isinstance(data, tuple):
        if hasattr(data, "_fields"):
            return type(data)(*(mapped(v, f"{path}.{f}") for f, v in zip(data._fields, data)))
        return tuple(mapped(value, f"{path}[{i}]") for i, value in enumerate(data))
    if isinstance(data, list) and lists(path):
        node: Node | None = Node(list, None, tuple(range(len(data))), tuple(data))
    else:
        node = _node_of(data)
    if node is None:
        return leaf(data, path)
    return build(replace(node, parts=tuple(mapped(p, path + _step(node, n)) for n, p in zip(node.names, node.parts))))


def _same(leaf: Any, path: str) -> Any:
    return leaf


def as_nodes(data: Any, lists: Callable[[str], bool] = lambda path: False) -> Any:
    """Replace objects, and lists whose paths `lists` accepts, by nodes."""
    return map_nest(_same, data, lists=lists)


def as_objects(nest: Any) -> Any:
    """Replace nodes in a nest of tensors by objects. Extension types are not validated."""
    return map_nest(_same, nest, build=_object_of)


def tuples_for_lists(nest: Any) -> Any:
    """Replace nodes of lists by tuples, because datasets and files cannot hold lists."""
    return map_nest(_same, nest, build=lambda node: node.parts if node.kind is list else node)


def paths_of_lists(nest: Any, path: str) -> frozenset[str]:
    """Return the paths of all lists in a nest with the path `path`."""
    found: list[str] = []

    def note(path: str) -> bool:
        found.append(path)
        return True

    map_nest(_same, nest, path, lists=note)
    return frozenset(found)


def nodes_of(nest: Any) -> list[Node]:
    """Return the nodes in the nest, at any depth, inner ones first."""
    found: list[Node] = []

    def note(node: Node) -> Node:
        found.append(node)
        return node

    map_nest(_same, nest, build=note)
    return found


def refused_by(nest: Any) -> tuple[Node, Exception] | None:
    """Return the first node in a nest of tensors that the `__validate__` of its extension type refuses, and the error."""
    for node in nodes_of(nest):
        made = as_objects(node)
        if isinstance(made, tf.experimental.ExtensionType):
            try:
                made.__validate__()
            except Exception as error:  # of any class
                return node, error
    return None


def check_same_structure(one: Any, other: Any) -> None:
    """Raise `TypeError` or `ValueError` if two nests, with nodes for objects, differ in more than their leaves."""
    tf.nest.assert_same_structure(one, other)
    for node, another in zip(nodes_of(one), nodes_of(other)):
        if node.key != another.key:
            raise ValueError(f"{node!r} and {another!r} differ besides their tensors")


def freeze(value: Any, leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Return a hashable value that is equal for nests of the same structure and leaves, or results of `leaf`."""
    if isinstance(value, Mapping):
        entries = sorted(value.items(), key=lambda entry: str(entry[0]))
        return (type(value), *((key, freeze(entry, leaf)) for key, entry in entries))
    if isinstance(value, tuple | list):
        return (type(value), *(freeze(entry, leaf) for entry in value))
    if isinstance(value, Node):
        return (Node, value.key, *(freeze(part, leaf) for part in value.parts))
    return leaf(value)


def _node_of(data: Any) -> Node | None:
    """Return an object as a node with the same parts; `None` for anything else."""
    if isinstance(data, Node):
        return data
    kind = getattr(data, "value_type", None) if isinstance(data, tf.TypeSpec) else type(data)
    if hasattr(type(data), "__attrs_attrs__"):
        names = tuple(attribute.name for attribute in type(data).__attrs_attrs__)
        return Node(type(data), None, names, tuple(getattr(data, name) for name in names))
    if isinstance(kind, type) and issubclass(kind, tf.experimental.ExtensionType):
        names = tuple(typing.get_type_hints(kind))  # as TensorFlow finds the fields
        return Node(kind, None, names, tuple(_field(getattr(data, name)) for name in names))
    if not isinstance(data, type) and hasattr(data, "__tf_flatten__") and hasattr(data, "__tf_unflatten__"):
        static, parts = data.__tf_flatten__()
        return Node(type(data), static, tuple(range(len(parts))), tuple(parts))
    return None


def _field(value: Any) -> Any:
    """Return a field of an extension type. Values that are not tensors become nodes."""
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
    if hasattr(node.kind, "__attrs_attrs__"):
        return node.kind(*node.parts)
    if issubclass(node.kind, tf.experimental.ExtensionType):
        made = node.kind.__new__(node.kind)  # without the constructor, which may take other arguments
        vars(made).update(zip(node.names, node.parts))
        return made
    return node.kind.__tf_unflatten__(node.static, node.parts)


def _step(node: Node, name: Any) -> str:
    """Return the step of a path from a node to a part."""
    return f".{name}" if isinstance(name, str) and not issubclass(node.kind, Mapping) else f"[{name!r}]"
