"""Invalid options: errors state what was given, what was expected and what to change, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ways import ONE, SEVERAL, Counter, Options, X

import devicemap
from devicemap.errors import DeviceError, DeviceMapError, OptionError, UnknownOptionError

UNKNOWN, BAD = UnknownOptionError, OptionError
BAD_OPTIONS: list[tuple[Options, type[Exception], str]] = [
    ({"batch_sise": 2}, UNKNOWN, r"^'batch_sise' is not an option; did you mean 'batch_size'\? The options "),
    ({"verbose": 1}, UNKNOWN, r"^'verbose' is not an option; did you mean 'progress'\?"),
    ({"q": 1}, UNKNOWN, r"^'q' is not an option\. The options are devices, batched, .*, name$"),
    ({"batched": 1}, BAD, r"^batched=1; expected True or False$"),
    ({"jit_compile": "yes"}, BAD, r"^jit_compile='yes'; expected True or False$"),
    ({"vectorize": "no"}, BAD, r"^vectorize='no'; expected True, False or 'auto'$"),
    ({"vectorize": 1}, BAD, r"^vectorize=1; expected True, False or 'auto'$"),
    ({"batched": True, "vectorize": True}, BAD, r"vectorize=True with batched=True: .* leave vectorize out"),
    ({"batched": True, "vectorize": False}, BAD, r"vectorize=False with batched=True: .* set batched=False"),
    ({"batched": True, "fn_output_signature": tf.int32}, BAD, r"fn_output_signature with .* leave it out$"),
    ({"batch_size": 0}, BAD, r"^batch_size=0; expected None, 'auto' or an int of at least 1, in rows per device call$"),
    ({"batch_size": np.int64(0)}, BAD, r"^batch_size=.*0.*; expected None, 'auto' or an int of at least 1"),
    ({"batch_size": 2.5}, BAD, r"^batch_size=2.5; "),
    ({"batch_size": True}, BAD, r"^batch_size=True; "),
    ({"batch_size": "4"}, BAD, r"^batch_size='4'; "),
    ({"batch_size": tf.constant(2)}, BAD, r"^batch_size=<tf.Tensor.*; expected None, 'auto' or an int"),
    ({"fn_output_signature": "x"}, BAD, r"^fn_output_signature='x'; expected a nest of dtypes and tf.TypeSpecs$"),
    ({"fn_output_signature": (tf.int32, 1.5)}, BAD, r"^fn_output_signature=\(tf.int32, 1.5\); expected a nest "),
    ({"in_place": [tf.Variable(1.0), 3]}, BAD, r"^in_place has 3; expected a tf\.Variable, or a list of them$"),
    ({"prefetch": 0}, BAD, r"^prefetch=0; expected None or an int of at least 1: how many chunks are under way "),
    ({"seed": -1}, BAD, r"^seed=-1; expected None or an int from 0 to 2\*\*32 - 1$"),
    ({"seed": 2**32}, BAD, r"^seed=4294967296; "),
    ({"name": ""}, BAD, r"^name=''; expected None or a non-empty string$"),
    ({"name": 3}, BAD, r"^name=3; expected None or a non-empty string$"),
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
    assert issubclass(UnknownOptionError, TypeError)  # as Python raises for an unknown keyword argument


@pytest.mark.parametrize("fn", [None, "tf.sin", X, np.zeros([3])], ids=lambda fn: type(fn).__name__)
def test_fn_is_not_callable(fn: Any) -> None:
    message = f"^fn is of type {type(fn).__name__}, not callable; fn comes first, then the data$"
    for call in (lambda: devicemap.DeviceMap(fn), lambda: devicemap.parallel_map(fn, tf.sin)):
        with pytest.raises(OptionError, match=message):
            call()


def test_integers_of_numpy() -> None:
    def fn(row: Any, seed: Any) -> Any:
        return row + tf.random.stateless_normal([2], seed)

    wanted = devicemap.parallel_map(fn, X, **ONE, batch_size=4, seed=2**32 - 1)
    for integer in (np.int64, np.uint32):
        options = {"batch_size": integer(4), "seed": integer(2**32 - 1)}
        np.testing.assert_array_equal(devicemap.parallel_map(fn, X, **SEVERAL, **options), wanted)


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
        pytest.raises(OptionError, match=r"GradientTape is recording, and .* batch_size and on_error, or "),
    ):
        mapper(data)
    assert fn.count == 0
    with tf.GradientTape() as tape, tape.stop_recording():  # what the message says
        np.testing.assert_array_equal(mapper(data), X)
