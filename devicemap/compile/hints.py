"""What to change where `fn` could not be traced: from what was given, and from the error that it gave. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

_FOR_EAGER_CODE = {
    **dict.fromkeys(("predict", "predict_on_batch"), "pass the model itself, with batched=True"),
    **dict.fromkeys(("fit", "evaluate", "train_on_batch"), "devicemap.parallelize(model) runs it on all devices"),
}
"""Methods of Keras models that read their data as NumPy does, and what to do instead."""

_WANTS_AXES = re.compile(r"incompatible with the layer: expected (min_)?ndim|Invalid input shape for input")

_WANTS_NUMBERS = re.compile(r"symbolic tf\.Tensor.* to a numpy array|has no attribute '(numpy|tolist|item|astype)'")

_NO_SLICES = re.compile(
    r"'(list|tuple|int|float)' object has no attribute '(dtype|shape)'|^Shapes .* are not compatible"
)

_WANTS_NAMES = re.compile(r"are valid indices, got '")


def hints_for(fn: Callable[..., Any], specs: Any, batched: bool, seeded: bool, error: Exception) -> Iterator[str]:
    """Sentences for the message.

    Args:
        fn: the user's function.
        specs: nest of `tf.TypeSpec`s of the data: a tuple is passed as several arguments.
        batched: whether `fn` got a batch.
        seeded: whether it got the keyword `seed`, too.
        error: what tracing it raised.
    """
    own = (fn.__name__,) if hasattr(getattr(fn, "__self__", None), "built") else ()
    called = getattr(getattr(fn, "__code__", None), "co_names", ())
    for name in (*own, *called):  # a method of a model, or what calls one
        if name in _FOR_EAGER_CODE:
            yield f"Keras's {name} is for eager code: {_FOR_EAGER_CODE[name]}"
            return
    of_keras = hasattr(fn, "built")  # layers and models have that
    in_keras = bool(_WANTS_AXES.search(str(error)))
    if not batched and (of_keras or in_keras):
        yield "A Keras layer or model takes batches: set batched=True"
    elif in_keras:
        yield "With batched=True the first axis is rows, and each element of a dataset is a batch: dataset.batch(n)"
    if of_keras and type(specs) is tuple:
        yield "A tuple is passed as several arguments: drop labels with dataset.map(lambda x, y: x)"
    if _WANTS_NUMBERS.search(str(error)):
        yield (
            "fn is traced as by tf.function, and its tensors have no numbers then: use what TensorFlow has (tf.sin for "
            "np.sin), or tf.numpy_function for what NumPy alone has"
        )
    if "IndexedSlices" in called and _NO_SLICES.search(str(error)):
        yield (
            "tf.IndexedSlices takes tensors: values of shape [n, ...], indices of shape [n] and dense_shape. Wrap lists in "
            "tf.constant or tf.stack, and give one slice as values[None] and index[None]"
        )
    if _WANTS_NAMES.search(str(error)):
        yield "A tensor has no names: pass a dict of columns as data, such as dict(frame)"
    yield from _about_arguments(fn, specs if type(specs) is tuple else (specs,), {"seed": None} if seeded else {})


def _about_arguments(fn: Callable[..., Any], given: tuple[Any, ...], seed: dict[str, Any]) -> Iterator[str]:
    if _fits(fn, *given, **seed):
        return
    if seed and _fits(fn, *given):
        yield "With the option seed, fn gets the keyword seed: let it take that, as in def fn(row, seed)"
    elif len(given) > 1 and _fits(fn, given, **seed):
        yield "A tuple is passed as several arguments: let fn take them, or pass a dict, which is one argument"
    elif len(given) == 1 and (count := next((n for n in range(2, 10) if _fits(fn, *given * n, **seed)), None)):
        yield f"fn takes {count} arguments: pass a tuple of {count} as data; a list or a dict is one argument"


def _fits(fn: Callable[..., Any], *given: Any, **seed: Any) -> bool:
    """Whether it can be called so, as far as its signature tells."""
    try:
        inspect.signature(fn, follow_wrapped=False).bind(*given, **seed)
    except TypeError:
        return False
    except ValueError:  # it has none that Python knows
        return True
    return True
