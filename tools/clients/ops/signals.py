"""`tf.signal` and `tf.audio`."""

from __future__ import annotations

import tensorflow as tf
from clients.data import COMPLEX, VECTORS, WAVES, normal, seeds, uniform

_RESPONSE = normal(4)[0]
_FILTERS = tf.signal.linear_to_mel_weight_matrix(4, 9, 8000, 20.0, 3900.0)

OPS = {
    "dct": (lambda x: tf.signal.dct(x, type=2, norm="ortho"), WAVES),
    "dct of types 1, 3 and 4": (lambda x: tuple(tf.signal.dct(x, type=t) for t in (1, 3, 4)), WAVES),
    "fft": (tf.signal.fft, COMPLEX),
    "fft2d": (tf.signal.fft2d, normal(4, 3, dtype=tf.complex64)),
    "fft3d": (tf.signal.fft3d, normal(2, 4, 3, dtype=tf.complex64)),
    "fftshift": (lambda x: (tf.signal.fftshift(x), tf.signal.ifftshift(x)), WAVES),
    "fftshift of an axis": (lambda x: tf.signal.fftshift(x, axes=-1), normal(3, 5)),
    "frame": (lambda x: tf.signal.frame(x, 8, 5, pad_end=True), WAVES),
    "hann_window": (lambda x: x * tf.signal.hann_window(32), WAVES),
    "idct": (lambda x: tf.signal.idct(x, norm="ortho"), WAVES),
    "ifft": (tf.signal.ifft, COMPLEX),
    "ifft2d": (tf.signal.ifft2d, normal(4, 3, dtype=tf.complex64)),
    "ifft3d": (tf.signal.ifft3d, normal(2, 4, 3, dtype=tf.complex64)),
    "inverse_stft": (lambda x: tf.signal.inverse_stft(tf.signal.stft(x, 16, 8), 16, 8), WAVES),
    "inverse_mdct": (lambda x: tf.signal.inverse_mdct(tf.signal.mdct(x, 8)), WAVES),
    "irfft": (lambda x: tf.signal.irfft(x, [8]), normal(5, dtype=tf.complex64)),
    "irfft2d": (tf.signal.irfft2d, normal(4, 5, dtype=tf.complex64)),
    "mdct": (lambda x: tf.signal.mdct(x, 8), WAVES),
    "mel": (lambda x: tf.abs(tf.signal.stft(x, 16, 8)) @ _FILTERS, WAVES),
    "mfcc": (
        lambda x: tf.signal.mfccs_from_log_mel_spectrograms(
            tf.math.log(tf.abs(tf.signal.stft(x, 16, 8)) @ _FILTERS + 0.1)
        ),
        WAVES,
    ),
    "overlap_and_add": (lambda x: tf.signal.overlap_and_add(x, 2), normal(3, 4)),
    "rfft": (tf.signal.rfft, WAVES),
    "rfft, padded": (lambda x: tf.signal.rfft(x, [40]), WAVES),
    "rfft2d": (tf.signal.rfft2d, normal(4, 6)),
    "rfft3d": (tf.signal.rfft3d, normal(2, 4, 6)),
    "stft": (lambda x: tf.signal.stft(x, 16, 8, pad_end=True), WAVES),
    "window that the row shifts": (lambda x, s: x * tf.random.stateless_uniform([32], s), (WAVES, seeds())),
    "audio spectrogram": (
        lambda x: tf.raw_ops.AudioSpectrogram(input=x[:, None], window_size=16, stride=8),
        uniform(-1.0, 1.0, 32),
    ),
    "wav": (lambda x: tf.audio.decode_wav(tf.audio.encode_wav(x[:, None], 8000), 1, 32).audio, uniform(-1.0, 1.0, 32)),
    "convolution by products": (
        lambda x: tf.signal.irfft(tf.signal.rfft(x, [8]) * tf.signal.rfft(_RESPONSE, [8]), [8]),
        VECTORS,
    ),
}
