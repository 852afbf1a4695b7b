"""Options given badly: errors say what was given, what was expected and what to change, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ways import ONE, SEVERAL, Counter, Options, X

import devicemap
from devicemap.errors import DeviceError, DeviceMapError, OptionError, UnknownOptionError

BAD_OPTIONS: list[tuple[Options, type[Exception], str]] = [
    (
        {"batch_sise": 2},
        UnknownOptionError,
        r"^'batch_sise' is not an option; did you mean 'batch_size'\? The options ",
    ),
    ({"device": "GPU"}, UnknownOptionError, r"'device' is not an option; did you mean 'devices'\?"),
    ({"verbose": 1}, UnknownOptionError, r"^'verbose' is not an option; did you mean 'progress'\?"),
    ({"num_workers": 2}, UnknownOptionError, r"^'num_workers' is not an option; did you mean 'devices'\?"),
    ({"parallel_calls": 2}, UnknownOptionError, r"^'parallel_calls' is not an option\. The options are devices, "),
    ({"q": 1}, UnknownOptionError, r"^'q' is not an option\. The options are devices, batched, .*, name$"),
    ({"batched": 1}, OptionError, r"^batched=1; expected True or False$"),
    ({"batched": None}, OptionError, r"^batched=None; expected True or False$"),
    ({"jit_compile": "yes"}, OptionError, r"^jit_compile='yes'; expected True or False$"),
    ({"vectorize": "no"}, OptionError, r"^vectorize='no'; expected True, False or 'auto'$"),
    ({"vectorize": 1}, OptionError, r"^vectorize=1; expected True, False or 'auto'$"),
    ({"batched": True, "vectorize": True}, OptionError, r"vectorize=True with batched=True: .* leave vectorize out"),
    ({"batched": True, "vectorize": False}, OptionError, r"vectorize=False with batched=True: .* set batched=False"),
    ({"batched": True, "fn_output_signature": tf.int32}, OptionError, r"fn_output_signature with .* leave it out$"),
    (
        {"batch_size": 0},
        OptionError,
        r"^batch_size=0; expected None, 'auto' or an int of at least 1, in rows per device call$",
    ),
    ({"batch_size": -3}, OptionError, r"^batch_size=-3; "),
    ({"batch_size": 2.5}, OptionError, r"^batch_size=2.5; "),
    ({"batch_size": True}, OptionError, r"^batch_size=True; "),
    ({"batch_size": "4"}, OptionError, r"^batch_size='4'; "),
    ({"batch_size": tf.constant(2)}, OptionError, r"^batch_size=<tf.Tensor.*; expected None, 'auto' or an int"),
    (
        {"fn_output_signature": "x"},
        OptionError,
        r"^fn_output_signature='x'; expected a nest of dtypes and tf.TypeSpecs$",
    ),
    (
        {"fn_output_signature": (tf.int32, 1.5)},
        OptionError,
        r"^fn_output_signature=\(tf.int32, 1.5\); expected a nest ",
    ),
    ({"in_place": [tf.Variable(1.0), 3]}, OptionError, r"^in_place has 3; expected a tf\.Variable, or a list of them$"),
    (
        {"prefetch": 0},
        OptionError,
        r"^prefetch=0; expected None or an int of at least 1: how many chunks are under way ",
    ),
    ({"prefetch": 2.0}, OptionError, r"^prefetch=2.0; expected None or an int "),
    ({"seed": -1}, OptionError, r"^seed=-1; expected None or an int from 0 to 2\*\*32 - 1$"),
    ({"seed": 2**32}, OptionError, r"^seed=4294967296; "),
    ({"seed": False}, OptionError, r"^seed=False; "),
    ({"seed": 1.0}, OptionError, r"^seed=1.0; "),
    ({"name": ""}, OptionError, r"^name=''; expected None or a non-empty string$"),
    ({"name": 3}, OptionError, r"^name=3; expected None or a non-empty string$"),
    ({"devices": "CPU:9"}, DeviceError, r"'CPU:9'.* there is CPU:0, CPU:1, .*CPU:7"),
    ({"output_device": "CPU:9"}, DeviceError, r"'CPU:9'.* there is CPU:0, "),
    ({"output_device": 7}, DeviceError, r"7 of type int; expected "),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:60])
def test_bad_options(options: Options, error: type[Exception], message: str) -> None:
    fn = Counter()
    for call in (lambda: devicemap.DeviceMap(fn, **options), lambda: devicemap.parallel_map(fn, X, **options)):
        with pytest.raises(error, match=message):
            call()
    assert fn.count == 0
    assert issubclass(error, DeviceMapError)
    assert issubclass(error, ValueError)


def test_an_unknown_option_is_a_type_error_too() -> None:
    """As Python raises for an unknown keyword argument."""
    with pytest.raises(TypeError, match="not an option"):
        devicemap.DeviceMap(tf.identity, colour="red")


@pytest.mark.parametrize("fn", [None, 3, "tf.sin"], ids=str)
def test_fn_is_not_callable(fn: Any) -> None:
    with pytest.raises(
        OptionError, match=f"^fn is of type {type(fn).__name__}, not callable; fn comes first, then the data$"
    ):
        devicemap.DeviceMap(fn)


@pytest.mark.parametrize("data", [X, np.zeros([3]), [1.0, 2.0]], ids=["tensor", "array", "list"])
def test_fn_after_the_data(data: Any) -> None:
    message = f"^fn is of type {type(data).__name__}, not callable; fn comes first, then the data$"
    with pytest.raises(OptionError, match=message):
        devicemap.parallel_map(data, tf.sin)


def test_numbers_of_numpy_are_numbers() -> None:
    def fn(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_normal([2], seed)

    wanted = devicemap.parallel_map(fn, X, **ONE, batch_size=4, seed=2**32 - 1)
    for integer in (np.int64, np.uint32):
        options = {"batch_size": integer(4), "seed": integer(2**32 - 1)}
        np.testing.assert_array_equal(devicemap.parallel_map(fn, X, **SEVERAL, **options), wanted)
    with pytest.raises(OptionError, match=r"^batch_size=.*0.*; expected None, 'auto' or an int of at least 1"):
        devicemap.DeviceMap(fn, batch_size=np.int64(0))


@pytest.mark.parametrize("autograph", [True, False])
def test_chunks_inside_a_function(autograph: bool) -> None:
    fn = Counter()
    mapper = devicemap.DeviceMap(fn, **SEVERAL, batch_size=3)
    message = "batch_size=3 inside a tf.function: chunks are .* Map outside of the tf.function, or leave batch_size out"
    with pytest.raises(OptionError, match=message) as caught:
        tf.function(lambda x: mapper(x), autograph=autograph)(X)
    assert type(caught.value) is OptionError
    assert fn.count == 0


@pytest.mark.parametrize("data", [X, tf.data.Dataset.from_tensor_slices(X)], ids=["in memory", "dataset"])
def test_a_tape_with_chunks(data: Any) -> None:
    fn = Counter()
    mapper = devicemap.DeviceMap(fn, **SEVERAL, batch_size=2)
    with (
        tf.GradientTape() as tape,
        pytest.raises(OptionError, match=r"GradientTape is recording, and .* batch_size, or "),
    ):
        mapper(data)
    assert fn.count == 0
    with tf.GradientTape() as tape, tape.stop_recording():  # what the message says
        np.testing.assert_array_equal(mapper(data), X)
