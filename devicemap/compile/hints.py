"""Advice for a function that could not be traced, from its arguments and the error. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

_FOR_EAGER_CODE = {
    **dict.fromkeys(("predict", "predict_on_batch"), "pass the model itself, with batched=True"),
    **dict.fromkeys(("fit", "evaluate", "train_on_batch"), "devicemap.parallelize(model) runs it on all devices"),
}
"""Methods of Keras models that read their data as NumPy arrays, and what to do instead."""

_FROM_KERAS = re.compile(r"incompatible with the layer: expected (min_)?ndim|Invalid input shape for input")

_ADVICE = {
    r"symbolic tf\.Tensor.* to a numpy array|has no attribute '(numpy|tolist|item|astype)'": "fn is traced as by "
    "tf.function, and its tensors have no numbers then: use TensorFlow's functions (tf.sin for np.sin), or "
    "tf.numpy_function for functions that only NumPy has",
    r"are valid indices, got '": "A tensor has no names: pass a dict of columns as data, such as dict(frame)",
}
"""Advice for errors with these messages."""


def hints_for(fn: Callable[..., Any], specs: Any, batched: bool, seeded: bool, error: Exception) -> Iterator[str]:
    """Yield sentences for the error message.

    Args:
        fn: the user's function.
        specs: nest of `tf.TypeSpec`s of the data: a tuple is passed as several arguments.
        batched: whether `fn` takes a batch.
        seeded: whether it also gets the keyword `seed`.
        error: what tracing raised.
    """
    method = (fn.__name__,) if hasattr(getattr(fn, "__self__", None), "built") else ()
    for name in (*method, *getattr(getattr(fn, "__code__", None), "co_names", ())):
        if name in _FOR_EAGER_CODE:
            yield f"Keras's {name} is for eager code: {_FOR_EAGER_CODE[name]}"
            return
    is_layer, from_keras = hasattr(fn, "built"), bool(_FROM_KERAS.search(str(error)))
    if not batched and (is_layer or from_keras):
        yield "A Keras layer or model takes batches: set batched=True"
    elif from_keras:
        yield "With batched=True the first axis is rows, and each element of a dataset is a batch: dataset.batch(n)"
    if is_layer and type(specs) is tuple:
        yield "A tuple is passed as several arguments: drop labels with dataset.map(lambda x, y: x)"
    yield from (advice for pattern, advice in _ADVICE.items() if re.search(pattern, str(error)))
    given, seed = specs if type(specs) is tuple else (specs,), {"seed": None} if seeded else {}
    if _takes(fn, *given, **seed):
        return
    if seed and _takes(fn, *given):
        yield "With the option seed, fn gets the keyword seed: let it take that, as in def fn(row, seed)"
    elif len(given) > 1 and _takes(fn, given, **seed):
        yield "A tuple is passed as several arguments: let fn take them, or pass a dict, which is one argument"
    elif len(given) == 1 and (count := next((n for n in range(2, 10) if _takes(fn, *given * n, **seed)), None)):
        yield f"fn takes {count} arguments: pass a tuple of {count} as data; a list or a dict is one argument"


def _takes(fn: Callable[..., Any], *given: Any, **seed: Any) -> bool:
    """Return whether the signature of `fn` allows this call. It does if Python does not know the signature."""
    try:
        inspect.signature(fn, follow_wrapped=False).bind(*given, **seed)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)
    return True
