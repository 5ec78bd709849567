"""FLOPs of the frozen video encoder (Wan 2.2): counted from its shape, exactly and as upstream counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_PIXEL_PATCH, _COLOURS = 2, 3


def vae_flops(
    frames: int,
    height: int,
    width: int,
    *,
    base_dim: int = 160,
    z_dim: int = 48,
    dim_mult: Sequence[int] = (1, 2, 4, 4),
    num_res_blocks: int = 2,
    temporal_downsample: Sequence[bool] = (False, True, True),
    upstream: bool = False,
) -> int:
    """FLOPs of encoding one video; a multiply-add is two.

    Args:
        frames, height, width: of the canvas, 4k + 1 frames; what is cropped from the latents afterwards is encoded too.
        base_dim, z_dim, dim_mult, num_res_blocks, temporal_downsample: keys of the encoder's config.json; the released
            values by default.
        upstream: count as NVIDIA's framework does: norms are added, and where frames are halved the first one is lost.
    """
    dims = [base_dim * factor for factor in (1, *dim_mult)]
    height, width = height // _PIXEL_PATCH, width // _PIXEL_PATCH
    norm = 5 if upstream else 0

    def area() -> int:
        return frames * height * width

    def residual(into: int, out: int) -> int:
        shortcut = 2 * into * out if into != out else 0
        return area() * (2 * 27 * (into * out + out * out) + shortcut + norm * (into + out))

    total = area() * 2 * 27 * _COLOURS * _PIXEL_PATCH**2 * dims[0]
    for stage, (into, out) in enumerate(pairwise(dims)):
        for block in range(num_res_blocks):
            total += residual(out if block else into, out)
        if stage == len(dim_mult) - 1:
            continue
        height, width = height // 2, width // 2
        total += area() * 2 * 9 * out * out
        if temporal_downsample[stage]:
            # the first frame passes unchanged, the others are halved
            halved = frames // 2
            total += halved * height * width * 2 * 3 * out * out
            frames = halved if upstream else halved + 1
    last = dims[-1]
    total += 2 * residual(last, last)
    pixels = height * width
    total += area() * (2 * 4 * last * last + norm * last) + frames * 4 * pixels * pixels * last
    latent = 2 * z_dim
    return total + area() * (2 * 27 * last * latent + norm * last + 2 * latent * latent)
