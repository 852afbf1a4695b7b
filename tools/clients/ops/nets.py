"""`tf.nn`, in the data formats that have kernels on CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from clients.data import IMAGES, PAIRS, SHARES, VECTORS, integers, normal, seeds, uniform

_random = np.random.default_rng(1)


def _kernel(*shape: int) -> Any:
    return tf.constant(_random.normal(size=shape), tf.float32)


_TEXT = normal(6, 2)
_VOLUMES = normal(4, 4, 4, 2)
_CHANNELS_FIRST = normal(3, 8, 8)
_K1, _K2, _K3, _DEPTH = _kernel(3, 2, 4), _kernel(3, 3, 3, 4), _kernel(2, 2, 2, 2, 3), _kernel(3, 3, 3, 2)
_K1T, _K2T, _K3T = _kernel(3, 4, 2), _kernel(3, 3, 4, 3), _kernel(2, 2, 2, 3, 2)
_K2G, _KE, _POINT = _kernel(2, 2, 2, 4), _kernel(2, 2, 3), _kernel(1, 1, 6, 4)
_TABLE = _kernel(7, 3)
_LABELS = integers(0, 4)


def _of_one(fn: Any) -> Any:
    """An op that wants a batch, of one row."""
    return lambda row: fn(row[None])[0]


def _ctc(logits: Any, labels: Any) -> Any:
    return tf.nn.ctc_loss(labels[None], logits[:, None], [2], [6], blank_index=0)[0]


def _batch_norm(data_format: str) -> Any:
    ones = tf.ones([3])
    return _of_one(
        lambda b: tf.compat.v1.nn.fused_batch_norm(
            b, ones, ones / 2, mean=ones / 3, variance=ones * 2, is_training=False, data_format=data_format
        )[0]
    )


_POOLS = {
    "avg_pool1d": (_of_one(lambda b: tf.nn.avg_pool1d(b, 2, 2, "VALID")), _TEXT),
    "avg_pool2d": (_of_one(lambda b: tf.nn.avg_pool2d(b, 3, 2, "SAME")), IMAGES),
    "avg_pool2d NCHW": (_of_one(lambda b: tf.nn.avg_pool2d(b, 2, 2, "VALID", "NCHW")), _CHANNELS_FIRST),
    "avg_pool3d": (_of_one(lambda b: tf.nn.avg_pool3d(b, 2, 2, "VALID")), _VOLUMES),
    "fractional_avg_pool": (
        lambda i: tf.nn.fractional_avg_pool(i[None], [1.0, 1.4, 1.4, 1.0], seed=1).output[0],
        IMAGES,
    ),
    "max_pool1d": (_of_one(lambda b: tf.nn.max_pool1d(b, 2, 2, "VALID")), _TEXT),
    "max_pool2d": (_of_one(lambda b: tf.nn.max_pool2d(b, 3, 2, "SAME")), IMAGES),
    "max_pool2d of explicit padding": (
        _of_one(lambda b: tf.nn.max_pool2d(b, 3, 2, [[0, 0], [1, 0], [0, 1], [0, 0]])),
        IMAGES,
    ),
    "max_pool2d NCHW": (
        _of_one(lambda b: tf.nn.max_pool2d(tf.stop_gradient(b), 2, 2, "VALID", "NCHW")),  # its gradient has no kernel
        _CHANNELS_FIRST,
    ),
    "max_pool3d": (_of_one(lambda b: tf.nn.max_pool3d(b, 2, 2, "VALID")), _VOLUMES),
    "max_pool_with_argmax": (
        lambda i: tuple(x[0] for x in tf.nn.max_pool_with_argmax(i[None], 2, 2, "VALID")),
        IMAGES,
    ),
    "max_pool_with_argmax, batch in index": (
        lambda i: tf.nn.max_pool_with_argmax(i[None], 2, 2, "VALID", include_batch_in_index=True)[1][0],
        IMAGES,
    ),
    "pool": (_of_one(lambda b: tf.nn.pool(b, [2, 2], "AVG", padding="VALID", dilations=[2, 2])), IMAGES),
}
_CONVOLUTIONS = {
    "atrous_conv2d": (_of_one(lambda b: tf.nn.atrous_conv2d(b, _K2, 2, "SAME")), IMAGES),
    "conv1d": (_of_one(lambda b: tf.nn.conv1d(b, _K1, 1, "SAME")), _TEXT),
    "conv1d NCW": (_of_one(lambda b: tf.nn.conv1d(b, _K1, 1, "VALID", data_format="NCW")), normal(2, 6)),
    "conv1d_transpose": (_of_one(lambda b: tf.nn.conv1d_transpose(b, _K1T, [1, 12, 4], 2)), _TEXT),
    "conv2d": (_of_one(lambda b: tf.nn.conv2d(b, _K2, 2, "SAME")), IMAGES),
    "conv2d NCHW": (_of_one(lambda b: tf.nn.conv2d(b, _K2, 1, "VALID", data_format="NCHW")), _CHANNELS_FIRST),
    "conv2d of a kernel of the row": (
        lambda i, k: tf.nn.conv2d(i[None], k, 1, "SAME")[0],
        (IMAGES, normal(3, 3, 3, 2)),
    ),
    "conv2d of only a kernel of the row": (lambda k: tf.nn.conv2d(IMAGES[:2], k, 1, "SAME"), normal(3, 3, 3, 2)),
    "conv2d, dilated": (_of_one(lambda b: tf.nn.conv2d(b, _K2, 1, "VALID", dilations=2)), IMAGES),
    "conv2d of groups": (_of_one(lambda b: tf.nn.conv2d(b, _K2G, 1, "SAME")), normal(6, 6, 4)),
    "conv2d of explicit padding": (
        _of_one(lambda b: tf.nn.conv2d(b, _K2, 1, [[0, 0], [2, 1], [0, 3], [0, 0]])),
        IMAGES,
    ),
    "conv2d_transpose": (
        _of_one(lambda b: tf.nn.conv2d_transpose(b, _K2T, [1, 16, 16, 4], 2)),
        IMAGES,
    ),
    "conv3d": (_of_one(lambda b: tf.nn.conv3d(b, _K3, [1] * 5, "SAME")), _VOLUMES),
    "conv3d_transpose": (
        _of_one(lambda b: tf.nn.conv3d_transpose(b, _K3T, [1, 8, 8, 8, 3], 2)),
        _VOLUMES,
    ),
    "convolution": (_of_one(lambda b: tf.nn.convolution(b, _K2, padding="SAME")), IMAGES),
    "depthwise_conv2d": (_of_one(lambda b: tf.nn.depthwise_conv2d(b, _DEPTH, [1, 1, 1, 1], "SAME")), IMAGES),
    "depthwise_conv2d of the row": (
        lambda i, k: tf.nn.depthwise_conv2d(i[None], k, [1, 1, 1, 1], "VALID")[0],
        (IMAGES, normal(3, 3, 3, 2)),
    ),
    "erosion2d": (
        _of_one(lambda b: tf.nn.erosion2d(b, _KE, [1, 1, 1, 1], "SAME", "NHWC", [1, 1, 1, 1])),
        IMAGES,
    ),
    "separable_conv2d": (
        _of_one(lambda b: tf.nn.separable_conv2d(b, _DEPTH, _POINT, [1, 1, 1, 1], "SAME")),
        IMAGES,
    ),
}
_LAYERS = {
    "batch_normalization": (lambda x, y: tf.nn.batch_normalization(x, y, 1.5, 0.1, 2.0, 1e-3), PAIRS),
    "bias_add": (_of_one(lambda b: tf.nn.bias_add(b, [1.0, 2.0, 3.0])), IMAGES),
    "bias_add NCHW": (_of_one(lambda b: tf.nn.bias_add(b, [1.0, 2.0, 3.0], "NCHW")), _CHANNELS_FIRST),
    "bias_add of the row": (lambda i, b: tf.nn.bias_add(i, b), (normal(4, 3), normal(3))),
    "fused_batch_norm": (_batch_norm("NHWC"), IMAGES),
    "fused_batch_norm NCHW": (_batch_norm("NCHW"), _CHANNELS_FIRST),
    "fused_batch_norm of the row's moments": (
        lambda i: tf.compat.v1.nn.fused_batch_norm(i[None], tf.ones([3]), tf.zeros([3]))[0][0],
        IMAGES,
    ),
    "lrn": (_of_one(lambda b: tf.nn.local_response_normalization(b, 2)), IMAGES),
    "embedding_lookup": (lambda n: tf.nn.embedding_lookup(_TABLE, n), integers(0, 7, 2)),
    "embedding_lookup_sparse": (
        lambda n: tf.nn.embedding_lookup_sparse(_TABLE, tf.sparse.from_dense(n[None]), None, combiner="mean")[0],
        integers(1, 7, 2, dtype=tf.int64),
    ),
    "safe_embedding_lookup_sparse": (
        lambda n: tf.nn.safe_embedding_lookup_sparse(_TABLE, tf.sparse.from_dense(n[None]))[0],
        integers(0, 7, 2, dtype=tf.int64),
    ),
    "space_to_depth": (_of_one(lambda b: tf.nn.space_to_depth(b, 2)), IMAGES),
    "depth_to_space": (_of_one(lambda b: tf.nn.depth_to_space(b, 2)), normal(3, 3, 8)),
    "space_to_batch": (lambda i: tf.nn.space_to_batch(i[None], [2, 2], [[0, 0], [0, 0]]), IMAGES),
    "batch_to_space": (lambda b: tf.batch_to_space(b, [2, 2], [[0, 1], [0, 0]]), normal(4, 3, 3, 2)),
    "with_space_to_batch": (
        _of_one(lambda b: tf.nn.with_space_to_batch(b, [2, 2], "SAME", lambda x, n, p: x * 2, [3, 3])),
        IMAGES,
    ),
    "dropout of the row's seed": (
        lambda x, s: tf.nn.experimental.stateless_dropout(x, 0.4, s),
        (normal(20), seeds()),
    ),
}
_ACTIVATIONS = {
    "crelu": (tf.nn.crelu, VECTORS),
    "elu": (tf.nn.elu, VECTORS),
    "gelu": (lambda x: (tf.nn.gelu(x), tf.nn.gelu(x, approximate=True)), VECTORS),
    "leaky_relu": (tf.nn.leaky_relu, VECTORS),
    "log_softmax": (lambda x: tf.nn.log_softmax(x, 0), normal(3, 4)),
    "relu": (tf.nn.relu, VECTORS),
    "relu6": (lambda x: tf.nn.relu6(4 * x), VECTORS),
    "selu": (tf.nn.selu, VECTORS),
    "silu": (tf.nn.silu, VECTORS),
    "softmax": (tf.nn.softmax, VECTORS),
    "softmax of another axis": (lambda x: tf.nn.softmax(x, 0), normal(3, 4)),
    "softsign": (tf.nn.softsign, VECTORS),
}
_LOSSES = {
    "collapse_repeated": (lambda x: tf.nn.collapse_repeated(x[None], [5])[1][0], integers(0, 2, 5)),
    "ctc_beam_search_decoder": (lambda x: tf.nn.ctc_beam_search_decoder(x[:, None], [6])[1][0], normal(6, 4)),
    "ctc_greedy_decoder": (lambda x: tf.nn.ctc_greedy_decoder(x[:, None], [6])[1][0], normal(6, 4)),
    "ctc_loss": (_ctc, (normal(6, 4), integers(1, 4, 2))),
    "log_poisson_loss": (lambda x, y: tf.nn.log_poisson_loss(tf.abs(x), y), PAIRS),
    "sigmoid_cross_entropy": (
        lambda x, y: tf.nn.sigmoid_cross_entropy_with_logits(labels=x, logits=y),
        (SHARES, VECTORS),
    ),
    "softmax_cross_entropy": (
        lambda x, y: tf.nn.softmax_cross_entropy_with_logits(labels=tf.nn.softmax(x), logits=y),
        PAIRS,
    ),
    "sparse_softmax_cross_entropy": (
        lambda n, x: tf.nn.sparse_softmax_cross_entropy_with_logits(labels=n, logits=x),
        (_LABELS, VECTORS),
    ),
    "weighted_cross_entropy": (
        lambda x, y: tf.nn.weighted_cross_entropy_with_logits(labels=x, logits=y, pos_weight=2.0),
        (SHARES, VECTORS),
    ),
    "weighted by the row": (
        lambda x, w: tf.nn.weighted_cross_entropy_with_logits(labels=x, logits=x, pos_weight=w),
        (SHARES, uniform(1.0, 2.0)),
    ),
}
OPS = {**_POOLS, **_CONVOLUTIONS, **_LAYERS, **_ACTIVATIONS, **_LOSSES}
