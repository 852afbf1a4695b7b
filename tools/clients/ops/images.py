"""`tf.image` and `tf.io`'s images."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from clients.data import BOXES, BYTES, IMAGES, integers, seeds, uniform

_SEEDED = (IMAGES, seeds())


def _drawn(name: str, **options: Any) -> Any:
    return (lambda image, seed: getattr(tf.image, "stateless_" + name)(image, seed=seed, **options), _SEEDED)


OPS = {
    "adjust_brightness": (lambda i: tf.image.adjust_brightness(i, 0.2), IMAGES),
    "adjust_contrast": (lambda i: tf.image.adjust_contrast(i, 1.5), IMAGES),
    "adjust_contrast of the row": (tf.image.adjust_contrast, (IMAGES, uniform(0.5, 2.0))),
    "adjust_gamma": (lambda i: tf.image.adjust_gamma(i, 0.7), IMAGES),
    "adjust_hue": (lambda i: tf.image.adjust_hue(i, 0.2), IMAGES),
    "adjust_hue of the row": (tf.image.adjust_hue, (IMAGES, uniform(-0.4, 0.4))),
    "adjust_jpeg_quality": (lambda i: tf.image.adjust_jpeg_quality(i, 50), IMAGES),
    "adjust_saturation": (lambda i: tf.image.adjust_saturation(i, 1.4), IMAGES),
    "adjust_saturation of the row": (tf.image.adjust_saturation, (IMAGES, uniform(0.5, 2.0))),
    "central_crop": (lambda i: tf.image.central_crop(i, 0.5), IMAGES),
    "combined_non_max_suppression": (
        lambda s: tf.image.combined_non_max_suppression(BOXES[None, :, None], s[None, :, None], 2, 2).nmsed_scores[0],
        uniform(0.1, 1.0, 3),
    ),
    "convert_image_dtype": (lambda i: tf.image.convert_image_dtype(i, tf.float32), BYTES),
    "convert_image_dtype to bytes": (lambda i: tf.image.convert_image_dtype(i, tf.uint8, saturate=True), IMAGES),
    "crop_and_resize": (
        lambda i: tf.image.crop_and_resize(i[None], BOXES, [0, 0, 0], [4, 4]),
        IMAGES,
    ),
    "crop_and_resize, nearest": (
        lambda i: tf.image.crop_and_resize(i[None], BOXES, [0, 0, 0], [4, 4], method="nearest"),
        IMAGES,
    ),
    "crop_to_bounding_box": (lambda i: tf.image.crop_to_bounding_box(i, 1, 2, 4, 3), IMAGES),
    "crop_to_bounding_box of the row": (
        lambda i, n: tf.image.crop_to_bounding_box(i, n, 1, 4, 3),
        (IMAGES, integers(0, 4)),
    ),
    "dilation2d": (
        lambda i: tf.nn.dilation2d(i[None], tf.ones([2, 2, 3]), [1, 1, 1, 1], "SAME", "NHWC", [1, 1, 1, 1])[0],
        IMAGES,
    ),
    "draw_bounding_boxes": (
        lambda i: tf.image.draw_bounding_boxes(i[None], BOXES[None], tf.ones([1, 3]))[0],
        IMAGES,
    ),
    "encode and decode JPEG": (lambda i: tf.io.decode_jpeg(tf.io.encode_jpeg(i), channels=3), BYTES),
    "encode and decode PNG": (lambda i: tf.ensure_shape(tf.io.decode_png(tf.io.encode_png(i)), [8, 8, 3]), BYTES),
    "decode any image": (
        lambda i: tf.ensure_shape(tf.io.decode_image(tf.io.encode_png(i), expand_animations=False), [8, 8, 3]),
        BYTES,
    ),
    "extract_glimpse": (
        lambda i, p: tf.image.extract_glimpse(i[None], [3, 3], p[None])[0],
        (IMAGES, uniform(-0.5, 0.5, 2)),
    ),
    "extract_patches": (
        lambda i: tf.image.extract_patches(i[None], [1, 3, 3, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID")[0],
        IMAGES,
    ),
    "flip": (lambda i: (tf.image.flip_left_right(i), tf.image.flip_up_down(i)), IMAGES),
    "grayscale": (lambda i: tf.image.grayscale_to_rgb(tf.image.rgb_to_grayscale(i)), IMAGES),
    "HSV": (lambda i: tf.image.hsv_to_rgb(tf.image.rgb_to_hsv(i) * 0.9), IMAGES),
    "image_gradients": (lambda i: tf.image.image_gradients(i[None]), IMAGES),
    "map of a row's boxes": (lambda i: tf.map_fn(lambda b: tf.reduce_sum(i) * b, BOXES), IMAGES),
    "non_max_suppression": (
        lambda s: tf.reduce_sum(tf.image.non_max_suppression(BOXES, s, 2)),
        uniform(0.1, 1.0, 3),
    ),
    "non_max_suppression, padded": (
        lambda s: tf.image.non_max_suppression_padded(BOXES, s, 2, pad_to_max_output_size=True),
        uniform(0.1, 1.0, 3),
    ),
    "pad_to_bounding_box": (lambda i: tf.image.pad_to_bounding_box(i, 1, 2, 12, 12), IMAGES),
    "per_image_standardization": (tf.image.per_image_standardization, IMAGES),
    "psnr": (lambda i: tf.image.psnr(i, i * 0.9, 1.0), IMAGES),
    "resize": (lambda i: tf.image.resize(i, [5, 11]), IMAGES),
    "resize, area": (lambda i: tf.image.resize(i, [5, 11], method="area"), IMAGES),
    "resize, bicubic": (lambda i: tf.image.resize(i, [5, 11], method="bicubic"), IMAGES),
    "resize, lanczos, antialiased": (lambda i: tf.image.resize(i, [5, 4], method="lanczos3", antialias=True), IMAGES),
    "resize, nearest": (lambda i: tf.image.resize(i, [5, 11], method="nearest"), BYTES),
    "resize of a size of the row": (lambda i, n: tf.reduce_sum(tf.image.resize(i, [n, 5])), (IMAGES, integers(2, 6))),
    "resize_with_crop_or_pad": (lambda i: tf.image.resize_with_crop_or_pad(i, 5, 11), IMAGES),
    "resize_with_pad": (lambda i: tf.image.resize_with_pad(i, 6, 12), IMAGES),
    "rot90": (lambda i: tf.image.rot90(i, 3), IMAGES),
    "rot90 of the row": (tf.image.rot90, (IMAGES, integers(0, 4))),
    "sobel_edges": (lambda i: tf.image.sobel_edges(i[None])[0], IMAGES),
    "ssim": (lambda i: tf.image.ssim(i, i * 0.9, 1.0, filter_size=4), IMAGES),
    "ssim_multiscale": (
        lambda i: tf.image.ssim_multiscale(i, i * 0.9, 1.0, power_factors=(0.5, 0.5), filter_size=4),
        IMAGES,
    ),
    "stateless_random_brightness": _drawn("random_brightness", max_delta=0.3),
    "stateless_random_contrast": _drawn("random_contrast", lower=0.5, upper=2.0),
    "stateless_random_crop": _drawn("random_crop", size=[4, 4, 3]),
    "stateless_random_flip": _drawn("random_flip_left_right"),
    "stateless_random_hue": _drawn("random_hue", max_delta=0.3),
    "stateless_random_jpeg_quality": _drawn("random_jpeg_quality", min_jpeg_quality=40, max_jpeg_quality=80),
    "stateless_random_saturation": _drawn("random_saturation", lower=0.5, upper=2.0),
    "total_variation": (tf.image.total_variation, IMAGES),
    "transform": (
        lambda i: tf.raw_ops.ImageProjectiveTransformV3(
            images=i[None],
            transforms=tf.constant([[1.0, 0.2, 0.5, -0.1, 1.0, 0.0, 0.0, 0.0]]),
            output_shape=[8, 8],
            fill_value=0.0,
            interpolation="BILINEAR",
        )[0],
        IMAGES,
    ),
    "transpose": (tf.image.transpose, IMAGES),
    "YIQ and YUV": (lambda i: (tf.image.rgb_to_yiq(i), tf.image.yuv_to_rgb(tf.image.rgb_to_yuv(i))), IMAGES),
}
