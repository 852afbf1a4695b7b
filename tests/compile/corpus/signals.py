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


def spectrogram_in_decibels(signal: Any) -> Any:
    power = tf.square(tf.abs(tf.signal.stft(signal, 32, 8, window_fn=tf.signal.hamming_window)))
    decibels = 10.0 * tf.math.log(tf.maximum(power, 1e-10)) / np.log(10.0)
    return tf.maximum(decibels, tf.reduce_max(decibels) - 80.0)


def fir(signal: Any) -> Any:
    return tf.nn.conv1d(signal[None, :, None], TAPS[:, None, None], stride=1, padding="SAME")[0, :, 0]


def fir_by_frames(signal: Any) -> Any:
    return tf.linalg.matvec(tf.signal.frame(tf.pad(signal, [[6, 0]]), 7, 1), TAPS[::-1])


def envelope(signal: Any) -> Any:
    """The magnitude of the analytic signal, by a Hilbert transform."""
    size = signal.shape[0]
    gain = np.zeros(size)
    gain[0] = gain[size // 2] = 1.0
    gain[1 : size // 2] = 2.0
    return tf.abs(tf.signal.ifft(tf.signal.fft(tf.cast(signal, tf.complex64)) * tf.cast(gain, tf.complex64)))


def autocorrelation(signal: Any) -> Any:
    size = signal.shape[0]
    spectrum = tf.signal.rfft(signal - tf.reduce_mean(signal), fft_length=[2 * size])
    lags = tf.signal.irfft(spectrum * tf.math.conj(spectrum), fft_length=[2 * size])[:size]
    return lags / lags[0]


def denoised(signal: Any) -> Any:
    """Without the frequencies that are weaker than half of the strongest."""
    spectrum = tf.signal.rfft(signal)
    kept = tf.where(tf.abs(spectrum) > 0.5 * tf.reduce_max(tf.abs(spectrum)), spectrum, tf.zeros_like(spectrum))
    return tf.signal.irfft(kept, [64])


def welch(signal: Any) -> Any:
    frames = tf.signal.frame(signal, 16, 8) * tf.signal.hann_window(16)
    return tf.reduce_mean(tf.square(tf.abs(tf.signal.rfft(frames))), axis=0)


def overlap_add(signal: Any) -> Any:
    frames = tf.signal.frame(signal, 16, 8) * tf.signal.hann_window(16)
    return tf.signal.overlap_and_add(frames, 8)


def stft_and_back(signal: Any) -> Any:
    spectrum = tf.signal.stft(signal, 16, 8)
    window = tf.signal.inverse_stft_window_fn(8)
    return tf.signal.inverse_stft(spectrum * 0.5, 16, 8, window_fn=window)


def zero_crossings(signal: Any) -> Any:
    return tf.reduce_sum(tf.cast(tf.sign(signal[1:]) != tf.sign(signal[:-1]), tf.int32))


def peak_frequency(signal: Any) -> Any:
    strength = tf.abs(tf.signal.rfft(signal))
    peak = tf.argmax(strength[1:]) + 1
    return tf.cast(peak, tf.float32) * (8000.0 / 64), strength[peak]


def moving_average(signal: Any) -> Any:
    sums = tf.cumsum(tf.pad(signal, [[1, 0]]))
    return (sums[5:] - sums[:-5]) / 5.0


def exponential_smoothing(signal: Any) -> Any:
    return tf.scan(lambda level, value: 0.9 * level + 0.1 * value, signal, initializer=signal[0])


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
    """The signal times a carrier of the row's frequency, low-passed and decimated."""
    phase = 2.0 * np.pi * frequency * tf.range(64, dtype=tf.float32)
    baseband = tf.complex(signal * tf.cos(phase), -signal * tf.sin(phase))
    return tf.reduce_mean(tf.reshape(baseband, [16, 4]), axis=1)


def cross_correlation(pair: Any) -> Any:
    a, b = tf.unstack(pair)
    spectrum = tf.signal.rfft(a) * tf.math.conj(tf.signal.rfft(b))
    lags = tf.signal.irfft(spectrum)
    return tf.argmax(lags, output_type=tf.int32), tf.reduce_max(lags)


def haar(signal: Any) -> Any:
    details = []
    for _ in range(3):
        even, odd = signal[0::2], signal[1::2]
        details.append((even - odd) / np.sqrt(2.0))
        signal = (even + odd) / np.sqrt(2.0)
    return tf.concat([signal, *details[::-1]], axis=0)


def normalised_loudness(signal: Any) -> Any:
    peak = tf.reduce_max(tf.abs(signal))
    quiet = tf.clip_by_value(signal / peak, -0.8, 0.8)
    return quiet / tf.sqrt(tf.reduce_mean(quiet**2) + 1e-8)


def mu_law(signal: Any) -> Any:
    bounded = tf.tanh(signal)
    squeezed = tf.sign(bounded) * tf.math.log1p(255.0 * tf.abs(bounded)) / np.log(256.0)
    return tf.cast((squeezed + 1.0) / 2.0 * 255.0 + 0.5, tf.int32)


def resampled(signal: Any) -> Any:
    places = tf.linspace(0.0, 62.9, 40)
    left = tf.cast(tf.floor(places), tf.int32)
    part = places - tf.cast(left, tf.float32)
    return (1.0 - part) * tf.gather(signal, left) + part * tf.gather(signal, left + 1)


def median_filter(signal: Any) -> Any:
    windows = tf.signal.frame(tf.pad(signal, [[2, 2]], mode="REFLECT"), 5, 1)
    return tf.sort(windows, axis=-1)[:, 2]


def unwrapped_phase(spectrum: Any) -> Any:
    phase = tf.math.angle(spectrum)
    steps = phase[1:] - phase[:-1]
    wrapped = tf.math.floormod(steps + np.pi, 2.0 * np.pi) - np.pi
    return tf.concat([phase[:1], phase[0] + tf.cumsum(wrapped)], axis=0)


SIGNALS = normal(64)
FUNCTIONS = {
    "MFCC": (mfcc, normal(256)),
    "spectrogram in decibels": (spectrogram_in_decibels, normal(128)),
    "FIR filter": (fir, SIGNALS),
    "FIR filter by frames": (fir_by_frames, SIGNALS),
    "Hilbert envelope": (envelope, SIGNALS),
    "autocorrelation": (autocorrelation, SIGNALS),
    "spectral denoising": (denoised, SIGNALS),
    "Welch spectrum": (welch, SIGNALS),
    "overlap and add": (overlap_add, SIGNALS),
    "STFT and back": (stft_and_back, SIGNALS),
    "zero crossings": (zero_crossings, SIGNALS),
    "peak frequency": (peak_frequency, SIGNALS),
    "moving average": (moving_average, SIGNALS),
    "exponential smoothing": (exponential_smoothing, SIGNALS),
    "biquad filter": (biquad, SIGNALS),
    "mixed down": (mixed_down, (SIGNALS, uniform(high=0.2))),
    "cross-correlation": (cross_correlation, normal(2, 64)),
    "Haar wavelet": (haar, SIGNALS),
    "normalised loudness": (normalised_loudness, SIGNALS),
    "mu-law companding": (mu_law, SIGNALS),
    "linear resampling": (resampled, SIGNALS),
    "median filter": (median_filter, SIGNALS),
    "unwrapped phase": (unwrapped_phase, complexes(32)),
    "cosine transform": (lambda s: tf.signal.idct(tf.signal.dct(s, norm="ortho")[:16], norm="ortho"), SIGNALS),
    "2-D spectrum": (lambda image: tf.abs(tf.signal.fftshift(tf.signal.fft2d(image))), complexes(8, 8)),
    "energy above threshold": (lambda s: tf.reduce_sum(tf.boolean_mask(s, s > 0.5) ** 2), SIGNALS),
}
