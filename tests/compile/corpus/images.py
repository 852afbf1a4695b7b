"""Images: one image `[height, width, channels]` in, as augmentation, filters and features take it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from compile.corpus.samples import integers, shared, uniform

KERNEL = shared(3, 3, 3, 4)
BLUR = tf.fill([3, 3, 3, 1], 1.0 / 9.0)
PALETTE = tf.abs(shared(16, 3))


def convolved(image: Any) -> Any:
    hidden = tf.nn.conv2d(image[None], KERNEL, strides=1, padding="SAME")
    hidden = tf.nn.relu(tf.nn.bias_add(hidden, tf.constant([0.1, -0.1, 0.2, 0.0])))
    return tf.squeeze(tf.nn.max_pool2d(hidden, 2, 2, "VALID"), axis=0)


def unsharp(image: Any) -> Any:
    blurred = tf.nn.depthwise_conv2d(image[None], BLUR, [1, 1, 1, 1], "SAME")[0]
    return tf.clip_by_value(image + 0.7 * (image - blurred), 0.0, 1.0)


def augmented(image: Any, seed: Any) -> Any:
    image = tf.image.stateless_random_flip_left_right(image, seed)
    image = tf.image.stateless_random_brightness(image, 0.2, seed)
    return tf.image.stateless_random_contrast(image, 0.8, 1.2, seed)


def patch_embedding(image: Any) -> Any:
    patches = tf.image.extract_patches(image[None], [1, 4, 4, 1], [1, 4, 4, 1], [1, 1, 1, 1], "VALID")
    return tf.reshape(patches, [9, 48]) @ shared(48, 4)


def boxes_kept(boxes: Any, scores: Any) -> Any:
    kept = tf.image.non_max_suppression(boxes, scores, 4, 0.3)
    return tf.pad(kept, [[0, 4 - tf.size(kept)]], constant_values=-1)


IMAGES, OTHERS = uniform(12, 12, 3), uniform(12, 12, 3, seed=1)
BYTES, SEEDS = integers(12, 12, 3, high=256, dtype=tf.uint8), integers(2, high=99)
CORNERS = tf.sort(uniform(6, 2, 2, seed=3), axis=2)
BOXES = tf.reshape(tf.transpose(CORNERS, [0, 1, 3, 2]), [5, 6, 4])
FUNCTIONS = {
    "gradient magnitude": (lambda i: tf.norm(tf.image.sobel_edges(i[None])[0], axis=-1), IMAGES),
    "convolution, bias, ReLU, pooling": (convolved, IMAGES),
    "unsharp mask": (unsharp, IMAGES),
    "augmentation of a seed": (augmented, (IMAGES, SEEDS)),
    "random crop of a seed": (lambda i, seed: tf.image.stateless_random_crop(i, [6, 6, 3], seed), (IMAGES, SEEDS)),
    "resized and scaled": (lambda i: tf.image.resize(i, [5, 7]) / tf.constant([0.2, 0.3, 0.4]), IMAGES),
    "colour jitter": (lambda i: tf.image.adjust_hue(tf.image.adjust_saturation(i, 0.7), 0.1), IMAGES),
    "HSV and back": (lambda i: tf.image.hsv_to_rgb(tf.image.rgb_to_hsv(i) * [1.0, 0.5, 1.0]), IMAGES),
    "histogram": (lambda i: tf.math.bincount(tf.cast(i, tf.int32), minlength=256, maxlength=256), BYTES),
    "palette": (lambda i: tf.argmin(tf.reduce_sum((i[:, :, None] - PALETTE) ** 2, axis=-1), axis=-1), IMAGES),
    "standardised image": (tf.image.per_image_standardization, IMAGES),
    "gamma of bytes": (lambda i: tf.image.convert_image_dtype(i, tf.float32) ** 2.2, BYTES),
    "patch embedding": (patch_embedding, IMAGES),
    "kept boxes": (boxes_kept, (BOXES, uniform(6))),
    "crop and padding": (lambda i: tf.image.resize_with_crop_or_pad(tf.image.central_crop(i, 0.5), 8, 8), IMAGES),
    "structural similarity": (lambda a, b: tf.image.ssim(a, b, 1.0, filter_size=5), (IMAGES, OTHERS)),
}
