"""Where two results differ, in words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tensorflow as tf

from devicemap.tell.verify.comparison import find_difference

NAN = float("nan")
RAGGED = tf.ragged.constant([[1.0, 2.0], [3.0]])
SPARSE = tf.sparse.from_dense([[0, 1], [2, 0]])


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (tf.constant([1.0, NAN]), tf.constant([1.0005, NAN])),
        (tf.constant([1e6]), tf.constant([1e6 + 500])),
        (tf.constant([1 + 1j], tf.complex64), tf.constant([1.0001 + 1j], tf.complex64)),
        (tf.cast([1.0, 2.0], tf.bfloat16), tf.cast([1.0, 2.0], tf.bfloat16)),
        (tf.constant(["a", "b"]), tf.constant(["a", "b"])),
        (tf.zeros([0, 3]), tf.zeros([0, 3])),
        ({"a": (RAGGED, SPARSE)}, {"a": (RAGGED + 1e-5, SPARSE)}),
    ],
    ids=str,
)
def test_the_same_to_rounding(got: Any, wanted: Any) -> None:
    assert find_difference(got, wanted, 1e-3) is None


@pytest.mark.parametrize(
    ("got", "wanted", "words"),
    [
        ({"a": tf.zeros([2])}, tf.zeros([2]), "the results have different structures, {'a': 'float32'} and float32"),
        (tf.zeros([2]), tf.zeros([2], tf.float64), "the result is float32 and float64"),
        (tf.zeros([2, 3]), tf.zeros([2]), r"the result has the shapes \[2, 3\] and \[2\]"),
        (
            (tf.zeros([2]), RAGGED),
            (tf.zeros([2]), tf.zeros([2])),
            r"the result\[1\] is a RaggedTensor and a EagerTensor",
        ),
        (tf.constant([1, 2]), tf.constant([1, 3]), r"the result has 2 and 3 at index \[1\]"),
        (tf.constant([True]), tf.constant([False]), r"the result has True and False at index \[0\]"),
        (tf.constant(["a"]), tf.constant(["b"]), r"the result has b'a' and b'b' at index \[0\]"),
        ({"x": tf.constant([NAN])}, {"x": tf.constant([0.0])}, r"the result\['x'\] has nan and 0.0 at index \[0\]"),
        (
            tf.constant([[1.0, 5.0], [7.0, 9.0]]),
            tf.constant([[1.0, 5.5], [7.0, 4.0]]),
            r"5.0 and 5.5 at index \[0, 1\], a difference of 0.5; 2 of 4 numbers differ, by at most 5",
        ),
        (tf.constant([1j], tf.complex64), tf.constant([2j], tf.complex64), "a difference of 1; 1 of 1 numbers differ"),
        (RAGGED, RAGGED + 1, r"the result, flat values, has 1.0 and 2.0 at index \[0\]"),
        (
            RAGGED,
            tf.ragged.constant([[1.0], [2.0, 3.0]]),
            r"the result, row lengths of axis 1, has 2 and 1 at index \[0\]",
        ),
        (SPARSE, tf.sparse.from_dense([[0, 1], [3, 0]]), r"the result, values, has 2 and 3 at index \[1\]"),
        (SPARSE, tf.sparse.from_dense([[1, 0], [2, 0]]), r"the result, indices, has 1 and 0 at index \[0, 1\]"),
    ],
)
def test_differences_are_told(got: Any, wanted: Any, words: str) -> None:
    assert re.search(words, find_difference(got, wanted, 1e-3) or "the same")
