"""Signal processing: one signal, or one spectrum, in."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from compile.corpus.samples import complexes, normal, shared, uniform

TAPS = shared(7)
MEL = tf.signal.linear_to_mel_weight_matrix(8, 17, 8000, 50.0, 3500.0)


def mfcc(signal: Any) -> Any:
    spectrum = tf.abs(tf.signal.stft(signal, frame_length=32, frame_step=16, fft_length=32))
    return tf.signal.mfccs_from_log_mel_spectrograms(tf.math.log(tf.matmul(spectrum, MEL) + 1e-6))[..., :4]


def stft_and_back(signal: Any) -> Any:
    spectrum = tf.signal.stft(signal, 16, 8)
    return tf.signal.inverse_stft(spectrum * 0.5, 16, 8, window_fn=tf.signal.inverse_stft_window_fn(8))


def denoised(signal: Any) -> Any:
    """Remove the frequencies that are weaker than half of the strongest."""
    spectrum = tf.signal.rfft(signal)
    strength = tf.abs(spectrum)
    return tf.signal.irfft(tf.where(strength > 0.5 * tf.reduce_max(strength), spectrum, tf.zeros_like(spectrum)), [64])


def welch(signal: Any) -> Any:
    frames = tf.signal.frame(signal, 16, 8) * tf.signal.hann_window(16)
    return tf.reduce_mean(tf.square(tf.abs(tf.signal.rfft(frames))), axis=0)


def peak_frequency(signal: Any) -> Any:
    strength = tf.abs(tf.signal.rfft(signal))
    peak = tf.argmax(strength[1:]) + 1
    return tf.cast(peak, tf.float32) * (8000.0 / 64), strength[peak]


def biquad(signal: Any) -> Any:
    out = tf.TensorArray(tf.float32, 64)
    s1, s2 = tf.constant(0.0), tf.constant(0.0)
    for t in tf.range(64):
        y = 0.2 * signal[t] + s1
        s1 = 0.4 * signal[t] + 0.3 * y + s2
        s2 = 0.2 * signal[t] - 0.2 * y
        out = out.write(t, y)
    return out.stack()


def mixed_down(signal: Any, frequency: Any) -> Any:
    """Multiply by a carrier of the row's frequency, then average and decimate."""
    phase = 2.0 * np.pi * frequency * tf.range(64, dtype=tf.float32)
    baseband = tf.complex(signal * tf.cos(phase), -signal * tf.sin(phase))
    return tf.reduce_mean(tf.reshape(baseband, [16, 4]), axis=1)


def unwrapped_phase(spectrum: Any) -> Any:
    phase = tf.math.angle(spectrum)
    wrapped = tf.math.floormod(phase[1:] - phase[:-1] + np.pi, 2.0 * np.pi) - np.pi
    return tf.concat([phase[:1], phase[0] + tf.cumsum(wrapped)], axis=0)


SIGNALS = normal(64)
FUNCTIONS = {
    "MFCC": (mfcc, normal(256)),
    "STFT and back": (stft_and_back, SIGNALS),
    "FIR filter": (lambda s: tf.nn.conv1d(s[None, :, None], TAPS[:, None, None], 1, "SAME")[0, :, 0], SIGNALS),
    "spectral denoising": (denoised, SIGNALS),
    "Welch spectrum": (welch, SIGNALS),
    "peak frequency": (peak_frequency, SIGNALS),
    "biquad filter": (biquad, SIGNALS),
    "mixed down": (mixed_down, (SIGNALS, uniform(high=0.2))),
    "median filter": (lambda s: tf.sort(tf.signal.frame(tf.pad(s, [[2, 2]], "REFLECT"), 5, 1))[:, 2], SIGNALS),
    "unwrapped phase": (unwrapped_phase, complexes(32)),
    "2-D spectrum": (lambda image: tf.abs(tf.signal.fftshift(tf.signal.fft2d(image))), complexes(8, 8)),
    "energy above threshold": (lambda s: tf.reduce_sum(tf.boolean_mask(s, s > 0.5) ** 2), SIGNALS),
}
