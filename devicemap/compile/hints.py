"""The error for a function that could not be traced. It shows the arguments of the function and gives advice."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from devicemap.data.rows import row_spec
from devicemap.errors import FunctionError, function_error, without_escape_codes
from devicemap.options import Options

_FOR_EAGER_CODE = {
    **dict.fromkeys(("predict", "predict_on_batch"), "pass the model itself, with batched=True"),
    **dict.fromkeys(("fit", "evaluate", "train_on_batch"), "devicemap.parallelize(model) runs it on all devices"),
}
"""Methods of Keras models that read their data as NumPy arrays, and what to do instead."""

_FROM_KERAS = re.compile(r"incompatible with the layer: expected (min_)?ndim|Invalid input shape for input")

_IN_A_LAYER = "Exception encountered when calling"
"""The beginning of Keras's messages about errors in a layer."""

_TAKES_BATCHES = re.compile(
    r"[Ss]hape must be (?:at least )?rank (?P<wanted>\d+) but is rank (?P<given>\d+)|"
    r"(?:reduction dimension|input dim) (?P<axis>\d+)\D+(?P=axis) dim"
)
"""Errors of TensorFlow's shape functions. A function that takes batches misses one axis if it gets one row."""

_OTHER_SIGNATURE = "Can not cast TensorSpec"
"""The beginning of TensorFlow's message for a tensor that does not fit the signature of a `tf.function`."""

_OTHER_DTYPE = re.compile(
    r"(?:(?:type|dtype|DataType|input to be a|is a|got|!=|Expected(?=.* of type 'float')) '?(?:tf\.)?|types \[(?:\w+, )*?)"
    r"(?P<dtype>double|float64|u?int\d+)\b"
)
"""Dtypes of data that often meet float32, in errors about dtypes."""

_OF_NUMPY = ("float64", "int64")
"""Default dtypes of NumPy."""

_OF_A_DICT = re.compile(
    r"operand type(\(s\))? for .*'dict'|'dict' object has no attribute|Expected any non-tensor type"
)
"""Errors of Python and TensorFlow about a dict of tensors in place of a tensor."""

_TWO_DTYPES = re.compile(r"has type ((?:u?int|b?float)\d+) that does not match type ((?:u?int|b?float)\d+)")
"""Errors about two arguments that must have the same dtype."""

_OF_TENSOR = r"'?\w*Tensor'? object"
"""The beginning of the messages of Python and TensorFlow about missing attributes of tensors."""

_OF_ARRAYS = "|".join({"numpy", *dir(np.ndarray)} - {*dir(str)})
"""Names of attributes of arrays, other than those of text."""

_PYTHON = "or tf.py_function, which runs Python code"

_IN_PYTHON = (
    "Python's in, any, all, sum, enumerate, range and assert need numbers: use tf.reduce_any(x == values), tf.range, "
    f"tf.debugging.Assert and the like, {_PYTHON}"
)

_ADVICE = {
    r"symbolic tf\.Tensor.* to a numpy array|(number( is required)?|or slices), not '?\w*Tensor|to \w*Tensor\.__format__|"
    rf"{_OF_TENSOR} (cannot be interpreted as an integer|has no attribute '({_OF_ARRAYS})')": "fn is traced as by "
    "tf.function, and its tensors have no numbers and no methods of NumPy then: use TensorFlow's functions (tf.sin for "
    "np.sin, tf.gather for values[i]), or tf.numpy_function, which runs Python code",
    r"are valid indices, got '": "A tensor has no names: pass a dict of columns as data, such as dict(frame)",
    r"Tensor is unhashable": "A tensor is no key of a dict: use tf.gather for the keys 0, 1, 2, ..., a "
    f"tf.lookup.StaticHashTable for others, {_PYTHON}",
    rf"{_OF_TENSOR} has no attribute 'read'|PathLike object, not \w*Tensor|should be path-like": "A path in the data is a "
    f"tensor: use tf.io.read_file and tf.io.decode_image, {_PYTHON}",
    r"'images' contains no shape": "tf.io.decode_image may return several images of a GIF: pass expand_animations=False",
    rf"{_OF_TENSOR} does not support item assignment": "A tensor cannot be changed: use tf.tensor_scatter_nd_update, or "
    "tf.where",
    r"is out of scope and cannot be used here": "A list or an attribute cannot keep tensors of a loop or a branch: use a "
    "tf.TensorArray, or ops on whole tensors",
    r"expected string or bytes-like object|must be str\b.*, not .*Tensor": "Python's functions of text take no tensors: use "
    f"tf.strings, such as tf.strings.regex_replace, {_PYTHON}",
    r"must have either 3 or 4 dimensions": "tf.image takes images of [height, width, channels]: image[..., None] adds the last "
    "axis",
    r"return value of type (coroutine|(async_)?generator)": "fn calls an async function or a generator, which "
    "returns no tensor",
    r"return value of type Operation": "fn returns an op without a value, such as tf.print(x): call it on a line of its "
    "own, and return a tensor",
    r"expects \d+ (named )?input\(s\).*but it received 1 input": "Pass several inputs as a tuple, because a list is one "
    "tensor. A map passes a tuple as several arguments: map lambda x, y: model([x, y])",
    r"singleton tf\.Variables": "fn creates a tf.Variable in each call: create variables, layers and optimizers outside",
    r"as a Python `bool` is not|Iterating over a symbolic": _IN_PYTHON,
}
"""Advice for errors with these messages."""

_NO_SOURCE = (
    "TensorFlow cannot read the source of fn, so its branches and loops stay Python's: define it by def, in a file or a "
    "notebook"
)
"""Advice in place of `_IN_PYTHON` if autograph has not converted `fn`."""

_RUN_EAGERLY = (
    "After tf.config.run_functions_eagerly(True), branches and loops of fn stay Python's: call "
    "tf.config.run_functions_eagerly(False) before"
)
"""Advice in place of `_IN_PYTHON` if autograph is off."""


def tracing_error(fn: Callable[..., Any], specs: Any, options: Options, error: Exception) -> FunctionError:
    """Return the error to raise for an error of tracing `fn` for data of these `[None, ...]` specs."""
    given = list(specs) if type(specs) is tuple else [specs]
    what = "a batch" if options.batched else "one row (batched=False)"
    if len(given) > 1:
        what += f", as {len(given)} arguments,"
    seed = [] if options.seed is None else [tf.TensorSpec([None, 2], tf.int32)]
    if not options.batched:
        given, seed = tf.nest.map_structure(row_spec, (given, seed))
    taken = ", ".join(map(str, given)) + "".join(f" and the keyword seed of {spec}" for spec in seed)
    hints = "".join(f". {hint}" for hint in _hints_for(fn, specs, options, error))
    return function_error(
        f"fn could not be traced for {what} of {taken}{hints}: {type(error).__name__}: "
        f"{without_escape_codes(str(error))}",
        error,
    )


def check_ranks(model: Any, specs: Any) -> None:
    """Raise a `ValueError` for a Keras model that maps single rows, and whose inputs are batches of such rows.

    Keras would add an axis to rows whose last dimension is 1, and take their first axis for that of the batch.
    """
    if is_model_of(model, specs):
        raise ValueError(f"the model takes batches of shape {', '.join(str(each.shape) for each in model.inputs)}")


def is_model_of(model: Any, specs: Any) -> bool:
    """Return whether a function is a Keras model whose inputs have shapes like these specs."""
    inputs, given = getattr(model, "inputs", None) if hasattr(model, "built") else None, tf.nest.flatten(specs)
    if not inputs or len(inputs) != len(given):
        return False
    return all(spec.shape.is_compatible_with(each.shape) for spec, each in zip(given, inputs))


def _hints_for(fn: Callable[..., Any], specs: Any, options: Options, error: Exception) -> Iterator[str]:
    """Yield sentences for the error message. The arguments are those of `tracing_error`."""
    method = (fn.__name__,) if hasattr(getattr(fn, "__self__", None), "built") else ()
    for name in (*method, *getattr(getattr(fn, "__code__", None), "co_names", ())):
        if name in _FOR_EAGER_CODE and _is_in_keras(error):
            yield f"Keras's {name} is for eager code: {_FOR_EAGER_CODE[name]}"
            return
    is_layer, from_keras = hasattr(fn, "built"), bool(_FROM_KERAS.search(str(error)))
    advice = [text for pattern, text in _ADVICE.items() if re.search(pattern, str(error))]
    if advice == [_IN_PYTHON] and tf.config.functions_run_eagerly():
        advice = [_RUN_EAGERLY]
    elif advice == [_IN_PYTHON] and not _has_source(fn):
        advice = [_NO_SOURCE]
    rank = _TAKES_BATCHES.search(str(error))
    misses_axis = rank and (rank["axis"] or int(rank["wanted"]) == int(rank["given"]) + 1)
    if not options.batched and (is_layer or from_keras or (_IN_A_LAYER in str(error) and not advice)):
        yield "A Keras layer or model takes batches: set batched=True"
    elif not options.batched and (misses_axis or _OTHER_SIGNATURE in str(error)):
        yield "One row has no axis for the batch: if fn takes batches, set batched=True"
    elif from_keras:
        yield "With batched=True the first axis is rows, and each element of a dataset is a batch: dataset.batch(n)"
    if is_layer and type(specs) is tuple and not advice:
        yield (
            "A tuple is passed as several arguments: drop labels with dataset.map(lambda x, y: x), or train by "
            "devicemap.parallelize"
        )
    yield from advice
    if isinstance(specs, Mapping) and _OF_A_DICT.search(str(error)):
        yield "A row of this data is a dict: fn gets it as one argument, with the tensors under its keys"
    yield from _hints_for_text(specs, error)
    yield from _hints_for_dtypes(specs, error)
    given, seed = specs if type(specs) is tuple else (specs,), {} if options.seed is None else {"seed": None}
    if _signature_allows(fn, *given, **seed):
        return
    if seed and _signature_allows(fn, *given):
        yield "With the option seed, fn gets the keyword seed: add this parameter, as in def fn(row, seed)"
    elif not seed and _signature_allows(fn, *given, seed=None):
        yield "fn has the parameter seed: pass the option seed, as in parallel_map(fn, data, seed=1)"
    elif len(given) > 1 and _signature_allows(fn, given, **seed):
        yield "A tuple is passed as several arguments: let fn take them, or pass a dict, which is one argument"
    elif len(given) == 1 and (
        count := next((n for n in range(2, 10) if _signature_allows(fn, *given * n, **seed)), None)
    ):
        yield f"fn takes {count} arguments: pass a tuple of {count} as data; a list or a dict is one argument"
    elif seed:
        yield "With the option seed, fn gets the row and the keyword seed, as in def fn(row, seed)"


def _hints_for_text(specs: Any, error: Exception) -> Iterator[str]:
    """Yield advice for methods of `str` that `fn` calls on a tensor."""
    method = re.search(rf"{_OF_TENSOR} has no attribute '(\w+)'", str(error))
    if method and (hasattr(str, method[1]) or hasattr(bytes, method[1])) and tf.string in _dtypes(specs):
        yield f"Text is a tensor of dtype string, which has no {method[1]}(): use tf.strings, {_PYTHON}"


def _hints_for_dtypes(specs: Any, error: Exception) -> Iterator[str]:
    """Yield advice for data that meets another dtype in `fn`."""
    mentioned = {"float64" if name == "double" else name for name in _OTHER_DTYPE.findall(str(error))}
    given = {dtype.name for dtype in _dtypes(specs)}
    pair = _TWO_DTYPES.search(str(error))
    wanted = next((dtype for dtype in pair.groups() if dtype not in given), "float32") if pair else "float32"
    for dtype in sorted(mentioned & given):
        default = ", NumPy's default" if dtype in _OF_NUMPY else ""
        yield (
            f"The data is {dtype}{default}: cast it before the call, as in data.astype('{wanted}'), or in fn, as in "
            f"tf.cast(x, tf.{wanted})"
        )


def _is_in_keras(error: BaseException) -> bool:
    """Return whether Keras, or code that it called, raised an error. Autograph keeps the traceback in the message only."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(_KERAS_FILE.search(frame.filename) for frame in frames) or bool(_KERAS_FILE.search(str(error)))


_KERAS_FILE = re.compile(r"[/\\](tf_)?keras[/\\]src[/\\]")


def _dtypes(specs: Any) -> set[tf.DType]:
    return {spec.dtype for spec in tf.nest.flatten(specs)}


def _has_source(fn: Callable[..., Any]) -> bool:
    """Return whether TensorFlow can read the source of a function, as of one in a file or a cell of a notebook."""
    try:
        return bool(inspect.getsource(fn if inspect.isroutine(fn) else type(fn).__call__))
    except (OSError, TypeError):
        return False


def _signature_allows(fn: Callable[..., Any], *given: Any, **seed: Any) -> bool:
    """Return whether the signature of `fn` allows this call. An unknown signature allows any call."""
    try:
        inspect.signature(fn, follow_wrapped=False).bind(*given, **seed)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)
    return True
