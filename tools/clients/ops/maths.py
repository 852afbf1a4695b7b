"""`tf.math` and `tf.bitwise`: elementwise, of two and more operands, reductions, and what sorts and counts."""

from __future__ import annotations

import tensorflow as tf
from clients.data import (
    ABOVE_ONE,
    COMPLEX,
    NUMBERS,
    PAIRS,
    POSITIVE,
    SHARES,
    VECTORS,
    WITHIN_ONE,
    bools,
    integers,
    normal,
    uniform,
)

_special = tf.math.special
_OF_ROWS = {
    (
        "abs asinh atan bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 ceil cos cosh dawsn erf "
        "erfc exp expm1 floor fresnel_cos fresnel_sin is_non_decreasing log_sigmoid negative rint round sigmoid "
        "sign sin sinh softplus square tan tanh"
    ): VECTORS,
    "acos asin atanh erfinv": WITHIN_ONE,
    "acosh": ABOVE_ONE,
    "angle conj imag real": COMPLEX,
    (
        "bessel_k0 bessel_k0e bessel_k1 bessel_k1e bessel_y0 bessel_y1 digamma expint lgamma log log1p reciprocal "
        "rsqrt spence sqrt"
    ): POSITIVE,
    "erfcinv ndtri": SHARES,
}
_ELEMENTWISE = {
    **{
        name: (getattr(tf.math, name, None) or getattr(_special, name), rows)
        for names, rows in _OF_ROWS.items()
        for name in names.split()
    },
    "abs complex": (tf.abs, COMPLEX),
    "is_finite": (lambda x: tf.math.is_finite(1 / tf.floor(x)), VECTORS),
    "is_inf": (lambda x: tf.math.is_inf(1 / tf.floor(x)), VECTORS),
    "is_nan": (lambda x: tf.math.is_nan(tf.sqrt(x)), VECTORS),
    "reciprocal_no_nan": (lambda x: tf.math.reciprocal_no_nan(tf.nn.relu(x)), VECTORS),
}
_SEVERAL_OPERANDS = {
    "add": (tf.add, PAIRS),
    "add a scalar of the row": (lambda x: x + x[0], VECTORS),
    "add_n": (lambda x, y: tf.add_n([x, y, x]), PAIRS),
    "approximate_equal": (lambda x, y: tf.raw_ops.ApproximateEqual(x=x, y=y, tolerance=1.0), PAIRS),
    "atan2": (tf.atan2, PAIRS),
    "betainc": (lambda x: tf.math.betainc(x, 1 + x, x / 2), SHARES),
    "bitwise": (
        lambda x, y: (tf.bitwise.bitwise_and(x, y), tf.bitwise.bitwise_or(x, y), tf.bitwise.bitwise_xor(x, y)),
        (NUMBERS, integers(-5, 6, 4)),
    ),
    "bitwise invert": (tf.bitwise.invert, NUMBERS),
    "bitwise shifts": (
        lambda x, y: (tf.bitwise.left_shift(x, y), tf.bitwise.right_shift(x, y)),
        (NUMBERS, integers(0, 4, 4)),
    ),
    "bitcast": (lambda x: tf.bitcast(x, tf.int32), VECTORS),
    "bitcast to bytes": (lambda x: tf.bitcast(x, tf.uint8), VECTORS),
    "broadcast of rows of other shapes": (lambda x, y: x[:, None] * y, PAIRS),
    "clip_by_norm": (lambda x: tf.clip_by_norm(x, 1.0), VECTORS),
    "clip_by_value": (lambda x: tf.clip_by_value(x, -0.5, 0.5), VECTORS),
    "clip_by_value of the row": (lambda x: tf.clip_by_value(x, x[0], 2.0), VECTORS),
    "clip_by_global_norm": (lambda x, y: tuple(tf.clip_by_global_norm([x, y], 1.0)[0]), PAIRS),
    "comparisons": (lambda x, y: (x < y, x <= y, x > y, x >= y, tf.equal(x, y), tf.not_equal(x, y)), PAIRS),
    "complex": (tf.complex, PAIRS),
    "cross": (tf.linalg.cross, (normal(3), normal(3))),
    "divide_no_nan": (lambda x, y: tf.math.divide_no_nan(x, tf.nn.relu(y)), PAIRS),
    "floordiv": (tf.math.floordiv, PAIRS),
    "floormod": (tf.math.floormod, PAIRS),
    "floormod of integers": (lambda x, y: (x % y, x // y), (NUMBERS, integers(1, 6, 4))),
    "igamma": (lambda x: (tf.math.igamma(x, 1 + x), tf.math.igammac(x, 1 + x)), SHARES),
    "igamma by its first": (lambda x: tf.math.igamma(x, 0.7), SHARES),
    "lbeta": (tf.math.lbeta, POSITIVE),
    "logical": (
        lambda x, y: (tf.logical_and(x, y), tf.logical_or(x, y), tf.math.logical_xor(x, y), ~x),
        (bools(4), bools(4)),
    ),
    "maximum and minimum": (lambda x, y: (tf.maximum(x, y), tf.minimum(x, y)), PAIRS),
    "multiply_no_nan": (lambda x, y: tf.math.multiply_no_nan(1 / x, tf.nn.relu(y)), PAIRS),
    "nextafter": (tf.math.nextafter, PAIRS),
    "polygamma": (lambda x: tf.math.polygamma(tf.ones_like(x), x), POSITIVE),
    "polyval": (lambda x: tf.math.polyval([1.0, 2.0, x[0]], x), VECTORS),
    "pow": (tf.pow, (POSITIVE, normal(4))),
    "scalar_mul": (lambda x: tf.math.scalar_mul(x[1], x), VECTORS),
    "squared_difference": (tf.math.squared_difference, PAIRS),
    "truediv of integers": (lambda x: tf.truediv(x, 4), NUMBERS),
    "truncatediv": (lambda x: (tf.truncatediv(x, 3), tf.truncatemod(x, 3)), NUMBERS),
    "where": (lambda x, y: tf.where(x > 0, x, y), PAIRS),
    "where of a scalar of the row": (lambda x, y: tf.where(x[0] > 0, x, y), PAIRS),
    "where broadcast": (lambda x: tf.where(x > 0, x, 0.0), VECTORS),
    "where of one argument": (lambda x: tf.reduce_sum(tf.where(x > 0), 0), VECTORS),
    "xdivy": (lambda x, y: tf.math.xdivy(tf.nn.relu(x), y), PAIRS),
    "xlogy": (lambda x: (tf.math.xlogy(x, 1 + x), tf.math.xlog1py(x, x)), POSITIVE),
    "zeta": (lambda x: tf.math.zeta(1 + x, x), POSITIVE),
}
_REDUCTIONS = {
    "argmax and argmin": (lambda x: (tf.argmax(x), tf.argmin(x, output_type=tf.int32)), VECTORS),
    "argmax of the last axis": (lambda x: tf.argmax(x, axis=-1), normal(3, 4)),
    "count_nonzero": (tf.math.count_nonzero, NUMBERS),
    "cumprod": (lambda x: tf.math.cumprod(x, reverse=True), VECTORS),
    "cumsum": (lambda x: tf.cumsum(x, axis=-1, exclusive=True), normal(2, 4)),
    "cumsum of an axis of the row": (
        lambda x: tf.cumsum(tf.ones([2, 2]) * x[0], axis=tf.cast(x[1] > 0, tf.int32)),
        VECTORS,
    ),
    "cumulative_logsumexp": (tf.math.cumulative_logsumexp, VECTORS),
    "l2_normalize": (tf.math.l2_normalize, VECTORS),
    "moments": (lambda x: tf.nn.moments(x, [0]), normal(4, 2)),
    "normalize": (lambda x: tf.linalg.normalize(x, ord=1)[0], VECTORS),
    "reduce_all and any": (lambda x: (tf.reduce_all(x), tf.reduce_any(x, 0, keepdims=True)), bools(4)),
    "reduce_euclidean_norm": (tf.math.reduce_euclidean_norm, VECTORS),
    "reduce_logsumexp": (lambda x: tf.reduce_logsumexp(x, -1), normal(2, 4)),
    "reduce_max": (lambda x: tf.reduce_max(x, [0, -1]), normal(2, 3, 4)),
    "reduce_max of no axis": (lambda x: tf.reduce_max(x, []), VECTORS),
    "reduce_mean": (lambda x: tf.reduce_mean(x, -2, keepdims=True), normal(2, 4)),
    "reduce_min": (tf.reduce_min, VECTORS),
    "reduce_prod": (tf.reduce_prod, VECTORS),
    "reduce_std": (tf.math.reduce_std, VECTORS),
    "reduce_sum of an axis of the row": (
        lambda x: tf.reduce_sum(tf.ones([2, 2]) * x[0], axis=tf.cast(x[1] > 0, tf.int32)),
        VECTORS,
    ),
    "reduce_variance": (tf.math.reduce_variance, VECTORS),
    "weighted_moments": (lambda x, y: tf.nn.weighted_moments(x, [0], y), (VECTORS, POSITIVE)),
    "zero_fraction": (lambda x: tf.math.zero_fraction(tf.nn.relu(x)), VECTORS),
}
_SORTING_AND_COUNTING = {
    "argsort": (lambda x: tf.argsort(x, direction="DESCENDING", stable=True), VECTORS),
    "bincount": (lambda x: tf.math.bincount(x, minlength=4, maxlength=4), integers(0, 6, 5)),
    "bincount of any length": (lambda x: tf.reduce_sum(tf.math.bincount(x) ** 2), integers(0, 6, 5)),
    "bincount with weights": (
        lambda x, w: tf.math.bincount(x, weights=w, minlength=6, maxlength=6),
        (integers(0, 6, 4), POSITIVE),
    ),
    "bincount of an axis": (lambda x: tf.math.bincount(x, minlength=6, maxlength=6, axis=-1), integers(0, 6, 2, 5)),
    "binary bincount": (
        lambda x: tf.math.bincount(x, minlength=6, maxlength=6, binary_output=True),
        integers(0, 6, 5),
    ),
    "confusion_matrix": (
        lambda x, y: tf.math.confusion_matrix(x, y, num_classes=3),
        (integers(0, 3, 5), integers(0, 3, 5)),
    ),
    "digitize": (lambda x: tf.raw_ops.Bucketize(input=x, boundaries=[-1.0, 0.0, 1.0]), VECTORS),
    "histogram_fixed_width": (lambda x: tf.histogram_fixed_width(x, [-2.0, 2.0], nbins=5), normal(12)),
    "histogram_fixed_width of the row's range": (
        lambda x: tf.histogram_fixed_width(x, tf.stack([tf.reduce_min(x), tf.reduce_max(x)]), nbins=5),
        normal(12),
    ),
    "histogram_fixed_width_bins": (lambda x: tf.histogram_fixed_width_bins(x, [-2.0, 2.0], nbins=5), normal(12)),
    "in_top_k": (lambda p, y: tf.math.in_top_k(y, p, 2), (normal(2, 4), integers(0, 4, 2))),
    "invert_permutation": (lambda x: tf.math.invert_permutation(tf.argsort(x)), VECTORS),
    "searchsorted": (lambda x, y: tf.searchsorted(tf.sort(x), y, side="right"), PAIRS),
    "searchsorted in a shared list": (lambda x: tf.searchsorted([-1.0, 0.0, 1.0], x), VECTORS),
    "segments of sorted values": (lambda x: tf.math.segment_sum(tf.sort(x), [0, 0, 1, 1]), VECTORS),
    "setdiff1d": (lambda x: tf.size(tf.sets.difference([x], [[1, 2, 3]]).values), integers(0, 6, 5)),
    "sort": (lambda x: tf.sort(x, axis=0, direction="DESCENDING"), normal(4, 2)),
    "sort integers": (tf.sort, NUMBERS),
    "top_k": (lambda x: tf.math.top_k(x, 2), VECTORS),
    "top_k of the row": (lambda x, k: tf.reduce_sum(tf.math.top_k(x, k)[0]), (VECTORS, integers(1, 4))),
    "approx_max_k": (lambda x: tf.math.approx_max_k(x, 2), VECTORS),
    "nth_element": (lambda x: tf.raw_ops.NthElement(input=x, n=1), VECTORS),
    "unique": (lambda x: tf.unique(x)[1], integers(0, 3, 5)),
    "unique, padded": (lambda x: tf.ensure_shape(tf.pad(tf.unique(x)[0], [[0, 5]])[:5], [5]), integers(0, 3, 5)),
    "unique_with_counts": (lambda x: tf.reduce_max(tf.unique_with_counts(x)[2]), integers(0, 3, 5)),
    "unique of an axis": (
        lambda x: tf.reduce_sum(tf.raw_ops.UniqueV2(x=x, axis=[0])[0]),
        integers(0, 2, 4, 2),
    ),
    "sobol_sample": (lambda x: tf.math.sobol_sample(4, 3) * x[0], VECTORS),
    "sobol_sample of the row": (
        lambda n: tf.reduce_sum(tf.math.sobol_sample(2, n)),
        integers(1, 5),
    ),
    "linspace": (lambda x: tf.linspace(x[0], x[1], 5), VECTORS),
    "range of the row": (lambda n: tf.reduce_sum(tf.range(n)), integers(0, 5)),
    "float range of the row": (lambda x: tf.reduce_sum(tf.range(0.0, x, 0.5)), uniform(0.6, 3.0)),
    "l2_loss": (tf.nn.l2_loss, VECTORS),
    "quantize": (lambda x: tf.quantization.fake_quant_with_min_max_args(x, -1.0, 1.0), VECTORS),
    "quantize and dequantize": (lambda x: tf.quantization.quantize_and_dequantize_v2(x, -2.0, 2.0), VECTORS),
    "quantize by the row": (
        lambda x: tf.quantization.quantize_and_dequantize_v2(x, 0.0, 0.0, range_given=False),
        VECTORS,
    ),
}
OPS = {**_ELEMENTWISE, **_SEVERAL_OPERANDS, **_REDUCTIONS, **_SORTING_AND_COUNTING}
