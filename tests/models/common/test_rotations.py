"""Rotations in their written forms: there and back, also where a form has an edge."""

import numpy as np
import pytest

from models.common.rotations import (
    matrix_from_rot6d,
    matrix_from_rotvec,
    nearest_rotation,
    rot6d_from_matrix,
    rotvec_from_matrix,
)

RNG = np.random.default_rng(0)


def axes(count: int) -> np.ndarray:
    vector = RNG.normal(size=(count, 3))
    return vector / np.linalg.norm(vector, axis=1, keepdims=True)


@pytest.mark.parametrize("angle", [0.0, 1e-12, 1e-4, 0.00099, 0.00101, 0.7, 2.5, 3.1415, np.pi - 1e-9])
def test_rotation_vectors_come_back(angle: float) -> None:
    """Near a half turn an axis and its opposite are almost the same rotation; the one given is the one read."""
    vectors = axes(50) * angle
    matrix = matrix_from_rotvec(vectors)
    np.testing.assert_allclose(
        matrix @ np.swapaxes(matrix, -1, -2), np.broadcast_to(np.eye(3), matrix.shape), atol=1e-14
    )
    np.testing.assert_allclose(np.linalg.det(matrix), 1, atol=1e-13)
    np.testing.assert_allclose(rotvec_from_matrix(matrix), vectors, atol=2e-7 if angle > 3.14 else 1e-12)


def test_a_quarter_turn_about_z_is_the_matrix_everyone_knows() -> None:
    matrix = matrix_from_rotvec(np.array([0.0, 0.0, np.pi / 2]))
    np.testing.assert_allclose(matrix, [[0, -1, 0], [1, 0, 0], [0, 0, 1]], atol=1e-15)
    np.testing.assert_allclose(rot6d_from_matrix(matrix), [0, -1, 0, 1, 0, 0], atol=1e-15)


def test_half_turns_about_the_axes_are_read() -> None:
    matrix = np.stack([np.diag(d) for d in ([1.0, -1, -1], [-1, 1.0, -1], [-1, -1, 1.0])])
    np.testing.assert_allclose(np.abs(rotvec_from_matrix(matrix)), np.eye(3) * np.pi, atol=1e-15)


def test_six_numbers_need_not_be_orthonormal() -> None:
    matrix = matrix_from_rotvec(axes(40) * RNG.uniform(0, 3, (40, 1))).reshape(4, 10, 3, 3)
    rows = rot6d_from_matrix(matrix)
    stretched = rows * np.repeat(RNG.uniform(0.2, 5, (4, 10, 2)), 3, axis=-1)
    stretched[..., 3:] += 0.7 * stretched[..., :3]
    np.testing.assert_allclose(matrix_from_rot6d(stretched), matrix, atol=1e-13)
    single = matrix_from_rot6d(rows.astype(np.float32))
    assert single.dtype == np.float64
    np.testing.assert_allclose(single, matrix, atol=3e-7)


def test_numbers_that_are_no_rotation_give_nan_and_do_not_spoil_others() -> None:
    rows = np.array([[0, 0, 0, 1, 0, 0], [1, 0, 0, 2, 0, 0], [1, 0, 0, 0, 1, 0]], np.float32)
    found = matrix_from_rot6d(rows)
    assert np.isnan(found[:2]).any(axis=(-2, -1)).all()
    np.testing.assert_array_equal(found[2], np.eye(3))


def test_the_nearest_rotation_removes_a_small_error() -> None:
    matrix = matrix_from_rotvec(axes(20))
    np.testing.assert_allclose(nearest_rotation(matrix * 1.01), matrix, atol=1e-12)
    shaken = matrix + RNG.normal(0, 1e-3, matrix.shape)
    left, _, right = np.linalg.svd(shaken)
    np.testing.assert_allclose(nearest_rotation(shaken), left @ right, atol=1e-12)
