"""Rotations of end effectors as 6 numbers, rotation vectors and matrices, for arrays of any leading shape, in float64.

The 6 numbers are the first two rows of the matrix. What is read need not be a rotation to the last bit: rows are made
orthonormal, and matrices replaced by the nearest rotation, as the reference implementations do it.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def matrix_from_rot6d(values: NDArray[np.floating]) -> Array:
    """[..., 6] -> [..., 3, 3]: Gram-Schmidt on the two rows in the precision they come in, then the nearest rotation.

    Two rows that are zero or parallel stand for no rotation and give NaN.
    """
    first, second = values[..., :3], values[..., 3:6]
    with np.errstate(divide="ignore", invalid="ignore"):
        first = first / np.sqrt(_dot(first, first))
        second = second - _dot(first, second) * first
        second = second / np.sqrt(_dot(second, second))
    return nearest_rotation(np.stack([first, second, np.cross(first, second)], axis=-2).astype(np.float64))


def rot6d_from_matrix(matrix: Array) -> Array:
    """[..., 3, 3] -> [..., 6]."""
    return np.ascontiguousarray(matrix[..., :2, :]).reshape(*matrix.shape[:-2], 6)


def matrix_from_rotvec(values: NDArray[np.floating]) -> Array:
    """[..., 3], axis times angle in radians -> [..., 3, 3]."""
    vector = values.astype(np.float64)
    angle = np.sqrt(np.sum(vector * vector, axis=-1, keepdims=True))
    # sin(a / 2) / a without the 0 / 0: its series is exact to double precision below 1e-3
    small = 0.5 - angle**2 / 48 + angle**4 / 3840
    scale = np.where(angle <= 1e-3, small, np.sin(angle / 2) / np.where(angle == 0, 1.0, angle))
    return _matrix_from_quaternion(np.concatenate([scale * vector, np.cos(angle / 2)], axis=-1))


def rotvec_from_matrix(matrix: Array) -> Array:
    """[..., 3, 3] -> [..., 3], axis times angle in radians, the angle in [0, pi]."""
    quaternion = _quaternion_from_matrix(matrix)
    quaternion = np.where(quaternion[..., 3:] < 0, -quaternion, quaternion)
    vector, scalar = quaternion[..., :3], quaternion[..., 3:]
    angle = 2 * np.arctan2(np.sqrt(np.sum(vector * vector, axis=-1, keepdims=True)), scalar)
    small = 2 + angle**2 / 12 + 7 * angle**4 / 2880
    return vector * np.where(angle <= 1e-3, small, angle / np.where(angle == 0, 1.0, np.sin(angle / 2)))


def nearest_rotation(matrix: Array) -> Array:
    """The rotation nearest to each [..., 3, 3] that is one up to a few per cent.

    Each step squares the error of a matrix's orthogonality; a decomposition would cost twenty times as much.
    """
    for _ in range(4):
        error = product(matrix, matrix, "ji...,jk...->ik...") - np.eye(3)
        if not np.any(np.abs(error) > 1e-12):  # NaN stays as it is
            break
        matrix = matrix - 0.5 * product(matrix, error)
    return matrix


def product(a: Array, b: Array, indices: str = "ij...,jk...->ik...") -> Array:
    """[..., 3, 3] of two arrays of such, by an index rule over the last two axes.

    The many matrices lie along the inner loop here: `@` takes some twenty times as long for so small ones.
    """
    planes = (np.ascontiguousarray(np.moveaxis(matrix, (-2, -1), (0, 1))) for matrix in (a, b))
    return np.moveaxis(np.einsum(indices, *planes), (0, 1), (-2, -1))


def _dot(a: NDArray[np.floating], b: NDArray[np.floating]) -> NDArray[np.floating]:
    """[..., 3] -> [..., 1], products in the inputs' precision summed in double: how BLAS does it for short vectors."""
    return np.sum(a * b, axis=-1, keepdims=True, dtype=np.float64).astype(a.dtype)


def _matrix_from_quaternion(quaternion: Array) -> Array:
    """[..., 4] with the scalar last, of unit length -> [..., 3, 3]."""
    x, y, z, w = np.moveaxis(quaternion, -1, 0)
    rows = [
        [x * x - y * y - z * z + w * w, 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), -x * x + y * y - z * z + w * w, 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), -x * x - y * y + z * z + w * w],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def _quaternion_from_matrix(matrix: Array) -> Array:
    """[..., 3, 3] -> [..., 4] with the scalar last, of unit length.

    Of the four ways to read a quaternion off a matrix the one that divides by the largest component is taken.
    """
    m = matrix
    trace = m[..., 0, 0] + m[..., 1, 1] + m[..., 2, 2]
    candidates = []
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        q = np.empty((*m.shape[:-2], 4))
        q[..., i] = 1 - trace + 2 * m[..., i, i]
        q[..., j] = m[..., j, i] + m[..., i, j]
        q[..., k] = m[..., k, i] + m[..., i, k]
        q[..., 3] = m[..., k, j] - m[..., j, k]
        candidates.append(q)
    q = np.empty((*m.shape[:-2], 4))
    q[..., 0], q[..., 1] = m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0]
    q[..., 2], q[..., 3] = m[..., 1, 0] - m[..., 0, 1], 1 + trace
    candidates.append(q)
    largest = np.argmax(np.stack([m[..., 0, 0], m[..., 1, 1], m[..., 2, 2], trace], axis=-1), axis=-1)
    chosen = np.take_along_axis(np.stack(candidates, axis=-2), largest[..., None, None], axis=-2)[..., 0, :]
    return chosen / np.linalg.norm(chosen, axis=-1, keepdims=True)
