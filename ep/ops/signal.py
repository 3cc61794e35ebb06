"""Fourier transforms: the last axis holds real numbers (length 1) or real and imaginary parts (length 2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ep.errors import InvalidInput
from ep.ops.axes import at, axis_of, scalar
from ep.ops.precision import in_wide, wide
from ep.registry import Host, op

# Real signals up to this length are transformed by a product. Vocoders divide by the real parts of such short frames,
# and the butterflies of a fast transform may round small parts to zero: 0 / 0 all over an unvoiced passage.
SHORT = 32


@op("DFT", since=20)
def dft(xp, x, dft_length: Host = None, axis: Host = None, *, inverse=0, onesided=0):
    axis = axis_of(-2 if axis is None else scalar(axis), x.ndim)
    length = None if dft_length is None else scalar(dft_length)
    return xp.astype(_dft(xp, wide(xp, x), length, axis, bool(inverse), bool(onesided)), xp.dtype_of(x))


@op("DFT", since=17)
def dft_17(xp, x, dft_length: Host = None, *, axis=1, inverse=0, onesided=0):
    return dft(xp, x, dft_length, np.asarray(axis), inverse=inverse, onesided=onesided)


def _dft(xp: Any, x: Any, length: int | None, axis: int, inverse: bool, onesided: bool) -> Any:
    if x.shape[-1] not in (1, 2):
        raise InvalidInput(f"the last axis of a signal has 1 or 2 elements, not {x.shape[-1]}.")
    if axis == x.ndim - 1:
        raise InvalidInput(f"axis {axis} of the DFT is the one that holds real and imaginary parts.")
    if inverse and onesided:
        length = 2 * (x.shape[axis] - 1) if length is None else length
        whole = _mirrored(xp, _fitted(xp, x, length // 2 + 1, axis), length, axis)
        return _transformed(xp, whole, axis, True)[..., :1]
    x = _fitted(xp, x, x.shape[axis] if length is None else length, axis)
    n = x.shape[axis]
    bins = n // 2 + 1 if onesided else n
    if x.shape[-1] == 1 and not inverse and 0 < n <= SHORT:
        return _product(xp, x, axis, bins)
    if x.shape[-1] == 1 and not inverse and onesided and n:
        return _parts(xp, xp.fft.rfft(x[..., 0], axis=axis))
    y = _transformed(xp, x, axis, inverse)
    return y[at(axis, slice(0, bins))] if onesided else y


def _fitted(xp: Any, x: Any, length: int, axis: int) -> Any:
    """x with this length along the axis: the end is cut off or filled with zeros."""
    x = x[at(axis, slice(0, length))]
    missing = length - x.shape[axis]
    return xp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x


def _mirrored(xp: Any, x: Any, length: int, axis: int) -> Any:
    """The whole spectrum of a real signal from its first half: the other half is conjugate."""
    if x.shape[-1] == 1:
        x = xp.concatenate([x, xp.zeros_like(x)], axis=-1)
    half = xp.flip(x[at(axis, slice(1, length - length // 2))], axis=axis)
    return xp.concatenate([x, half * xp.asarray(np.array([1, -1], xp.dtype_of(x)))], axis=axis)


def _product(xp: Any, x: Any, axis: int, bins: int) -> Any:
    """The first `bins` coefficients of a short real signal, as a product with the matrix of the transform."""
    n, dtype = x.shape[axis], xp.dtype_of(x)
    angles = 2 * np.pi / n * (np.outer(np.arange(n), np.arange(bins)) % n)
    table = np.stack([np.cos(angles), -np.sin(angles)], axis=-1)
    table[np.abs(table) < 1e-15] = 0  # sin(pi) and its like
    y = xp.matmul(xp.moveaxis(x[..., 0], axis, -1), xp.asarray(table.reshape(n, 2 * bins).astype(dtype)))
    return xp.moveaxis(xp.reshape(y, (*y.shape[:-1], bins, 2)), -2, axis)


def _parts(xp: Any, y: Any) -> Any:
    return xp.stack([xp.real(y), xp.imag(y)], axis=-1)


def _transformed(xp: Any, x: Any, axis: int, inverse: bool) -> Any:
    if x.shape[axis] == 1:  # its transform is itself, which not all libraries know
        return x if x.shape[-1] == 2 else xp.concatenate([x, xp.zeros_like(x)], axis=-1)
    kind = np.dtype(np.complex128 if xp.dtype_of(x) == np.float64 else np.complex64)
    signal = xp.astype(x[..., 0], kind)
    if x.shape[-1] == 2:
        signal = signal + xp.astype(x[..., 1], kind) * 1j
    y = xp.fft.ifft(signal, axis=axis) if inverse else xp.fft.fft(signal, axis=axis)
    return _parts(xp, y)


@op("STFT", since=17)
def stft(xp, signal, frame_step: Host, window=None, frame_length: Host = None, *, onesided=1):
    if signal.ndim == 2:  # a real signal without its axis of one part, as exporters write it and onnxruntime reads it
        signal = xp.expand_dims(signal, 2)
    if frame_length is not None:
        length = scalar(frame_length)
    else:
        length = signal.shape[1] if window is None else window.shape[0]
    return _stft(xp, signal, window, length=length, step=scalar(frame_step), onesided=bool(onesided))


@in_wide
def _stft(xp: Any, signal: Any, window: Any, *, length: int, step: int, onesided: bool) -> Any:
    channels = xp.swapaxes(signal, 1, 2)  # windows want [batch, channel, time]
    frames = xp.windows(channels, (length,), (step,), (1,))  # [batch, channel, frame, length]
    frames = xp.transpose(frames, (0, 2, 3, 1))
    if window is not None:
        frames = frames * xp.reshape(window, (1, 1, -1, 1))
    return _dft(xp, frames, None, 2, False, onesided)
