"""Images: one image `[height, width, channels]` in, as augmentation, filters and features take it."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from compile.corpus.samples import integers, normal, shared, uniform

KERNEL = shared(3, 3, 3, 4)
DEPTHWISE = shared(3, 3, 3, 1)
BLUR = tf.constant(np.outer([1, 2, 1], [1, 2, 1])[:, :, None, None] / 16.0 * np.ones([1, 1, 3, 1]), tf.float32)
PALETTE = tf.abs(shared(16, 3))


def gradient_magnitude(image: Any) -> Any:
    edges = tf.image.sobel_edges(image[None])[0]
    return tf.sqrt(tf.reduce_sum(edges**2, axis=-1) + 1e-6)


def convolved(image: Any) -> Any:
    hidden = tf.nn.conv2d(image[None], KERNEL, strides=1, padding="SAME")
    hidden = tf.nn.relu(tf.nn.bias_add(hidden, tf.constant([0.1, -0.1, 0.2, 0.0])))
    return tf.squeeze(tf.nn.max_pool2d(hidden, 2, 2, "VALID"), axis=0)


def unsharp(image: Any) -> Any:
    blurred = tf.nn.depthwise_conv2d(image[None], BLUR, [1, 1, 1, 1], "SAME")[0]
    return tf.clip_by_value(image + 0.7 * (image - blurred), 0.0, 1.0)


def crop_at(image: Any, corner: Any) -> Any:
    return tf.slice(image, [corner[0], corner[1], 0], [5, 5, 3])


def augmented(image: Any, seed: Any) -> Any:
    image = tf.image.stateless_random_flip_left_right(image, seed)
    image = tf.image.stateless_random_brightness(image, 0.2, seed)
    return tf.image.stateless_random_contrast(image, 0.8, 1.2, seed)


def random_crop(image: Any, seed: Any) -> Any:
    return tf.image.stateless_random_crop(image, [6, 6, 3], seed)


def resized_and_scaled(image: Any) -> Any:
    resized = tf.image.resize(image, [5, 7])
    return (resized - tf.constant([0.485, 0.456, 0.406])) / tf.constant([0.229, 0.224, 0.225])


def colour_jitter(image: Any) -> Any:
    image = tf.image.adjust_saturation(image, 0.7)
    return tf.image.adjust_hue(image, 0.1)


def histogram_equalised(image: Any) -> Any:
    """Of 8-bit grey values."""
    values = tf.cast(image[..., 0], tf.int32)
    counts = tf.math.bincount(tf.reshape(values, [-1]), minlength=256, maxlength=256)
    cumulative = tf.cumsum(counts)
    lowest = tf.reduce_min(tf.boolean_mask(cumulative, counts > 0))
    scaled = (cumulative - lowest) * 255 // tf.maximum(tf.size(values) - lowest, 1)
    return tf.cast(tf.gather(scaled, values), tf.uint8)


def quantised(image: Any) -> Any:
    """The nearest colours of a palette."""
    distances = tf.reduce_sum((image[:, :, None] - PALETTE) ** 2, axis=-1)
    return tf.gather(PALETTE, tf.argmin(distances, axis=-1))


def local_contrast(image: Any) -> Any:
    mean = tf.nn.avg_pool2d(image[None], 3, 1, "SAME")
    square = tf.nn.avg_pool2d(image[None] ** 2, 3, 1, "SAME")
    return ((image - mean) * tf.math.rsqrt(tf.maximum(square - mean**2, 0.0) + 0.01))[0]


def dilated_minus_eroded(image: Any) -> Any:
    return (tf.nn.max_pool2d(image[None], 3, 1, "SAME") + tf.nn.max_pool2d(-image[None], 3, 1, "SAME"))[0]


def patch_embedding(image: Any) -> Any:
    patches = tf.image.extract_patches(image[None], [1, 4, 4, 1], [1, 4, 4, 1], [1, 1, 1, 1], "VALID")
    return tf.reshape(patches, [9, 48]) @ tf.reshape(shared(48 * 4), [48, 4])


def bilinear_sample(image: Any, points: Any) -> Any:
    corner = tf.cast(tf.floor(points), tf.int32)
    part = (points - tf.floor(points))[:, :, None]
    at = lambda dy, dx: tf.gather_nd(image, corner + [dy, dx])
    top = at(0, 0) * (1 - part[:, 1]) + at(0, 1) * part[:, 1]
    bottom = at(1, 0) * (1 - part[:, 1]) + at(1, 1) * part[:, 1]
    return top * (1 - part[:, 0]) + bottom * part[:, 0]


def centre_of_mass(image: Any) -> Any:
    mass = tf.reduce_sum(image, axis=-1)
    y, x = tf.meshgrid(tf.range(12.0), tf.range(12.0), indexing="ij")
    return tf.stack([tf.reduce_sum(y * mass), tf.reduce_sum(x * mass)]) / tf.reduce_sum(mass)


def boxes_kept(boxes: Any, scores: Any) -> Any:
    kept = tf.image.non_max_suppression(boxes, scores, 4, 0.3)
    return tf.pad(kept, [[0, 4 - tf.size(kept)]], constant_values=-1)


def intersection_over_union(boxes: Any) -> Any:
    low = tf.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = tf.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    overlap = tf.reduce_prod(tf.nn.relu(high - low), axis=-1)
    area = tf.reduce_prod(boxes[:, 2:] - boxes[:, :2], axis=-1)
    return overlap / (area[:, None] + area[None] - overlap)


def mask_of_largest_channel(image: Any) -> Any:
    return tf.cast(tf.equal(image, tf.reduce_max(image, axis=-1, keepdims=True)), tf.uint8)


def gram(image: Any) -> Any:
    features = tf.nn.relu(tf.nn.conv2d(image[None], KERNEL, 2, "VALID"))
    return tf.linalg.einsum("bijc,bijd->bcd", features, features)[0] / 25.0


IMAGES = uniform(12, 12, 3)
BYTES = integers(12, 12, 3, high=256, dtype=tf.uint8)
CORNERS = tf.sort(uniform(6, 2, 2, seed=3), axis=2)
BOXES = tf.reshape(tf.transpose(CORNERS, [0, 1, 3, 2]), [5, 6, 4])
FUNCTIONS = {
    "gradient magnitude": (gradient_magnitude, IMAGES),
    "convolution, bias, ReLU, pooling": (convolved, IMAGES),
    "unsharp mask": (unsharp, IMAGES),
    "crop at a corner": (crop_at, (IMAGES, integers(2, high=7))),
    "augmentation of a seed": (augmented, (IMAGES, integers(2, high=99))),
    "random crop of a seed": (random_crop, (IMAGES, integers(2, high=99))),
    "resized and standardised": (resized_and_scaled, IMAGES),
    "resized to nearest": (lambda i: tf.image.resize(i, [6, 6], "nearest"), BYTES),
    "resized bicubic with antialiasing": (lambda i: tf.image.resize(i, [5, 5], "bicubic", antialias=True), IMAGES),
    "colour jitter": (colour_jitter, IMAGES),
    "luma": (lambda i: tf.image.rgb_to_grayscale(i)[..., 0], IMAGES),
    "HSV and back": (lambda i: tf.image.hsv_to_rgb(tf.image.rgb_to_hsv(i) * [1.0, 0.5, 1.0]), IMAGES),
    "histogram equalisation": (histogram_equalised, BYTES),
    "palette": (quantised, IMAGES),
    "local contrast": (local_contrast, IMAGES),
    "standardised image": (tf.image.per_image_standardization, IMAGES),
    "dilated minus eroded": (dilated_minus_eroded, IMAGES),
    "patch embedding": (patch_embedding, IMAGES),
    "bilinear sampling": (bilinear_sample, (IMAGES, uniform(4, 2, high=10.9))),
    "centre of mass": (centre_of_mass, IMAGES),
    "kept boxes": (boxes_kept, (BOXES, uniform(6))),
    "intersection over union": (intersection_over_union, BOXES),
    "mask of the largest channel": (mask_of_largest_channel, IMAGES),
    "Gram matrix of features": (gram, IMAGES),
    "flips and turns": (lambda i: tf.image.rot90(tf.image.flip_up_down(i)) + tf.transpose(i, [1, 0, 2]), IMAGES),
    "central crop and padding": (
        lambda i: tf.image.resize_with_crop_or_pad(tf.image.central_crop(i, 0.5), 8, 8),
        IMAGES,
    ),
    "separable convolution": (
        lambda i: tf.nn.separable_conv2d(i[None], DEPTHWISE, shared(1, 1, 3, 2), [1, 1, 1, 1], "SAME")[0],
        IMAGES,
    ),
    "transposed convolution": (
        lambda i: tf.nn.conv2d_transpose(i[None], shared(3, 3, 2, 3), [1, 24, 24, 2], 2)[0],
        IMAGES,
    ),
    "structural similarity": (
        lambda a, b: tf.image.ssim(a, b, 1.0, filter_size=5),
        (IMAGES, uniform(12, 12, 3, seed=1)),
    ),
    "bytes to floats and gamma": (lambda i: tf.image.convert_image_dtype(i, tf.float32) ** 2.2, BYTES),
    "total variation": (lambda i: tf.image.total_variation(i) / tf.cast(tf.size(i), tf.float32), normal(6, 6, 1)),
}
