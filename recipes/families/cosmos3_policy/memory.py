"""Memory of a rank that a recipe's training takes: what stays, and what a step adds for its pack."""

from recipes.families.cosmos3_policy.build import model_config, processor_config
from recipes.parts import parts
from recipes.schema import Recipe
from recipes.sources import open_part
from recipes.stages import dataset_to_come

CAPTION_TOKENS = 150
"""Of a DROID caption as a JSON prompt, about; what changes it is the caption, not the recipe."""


def memory_table(recipe: Recipe, ranks: int) -> str:
    """Weights, gradients, optimiser state, averages and activations by part, as text.

    Of a checkpoint that lies elsewhere the released sizes are taken; of data that is still to be made there is no step.
    """
    import torch

    from models.cosmos3_policy.flops import PackShape
    from models.cosmos3_policy.memory import predict

    config, shape, clips, notes = model_config(recipe), None, 0, []
    if not dataset_to_come(recipe):
        count, vision, pixels = _pack(recipe, ranks)
        actions = recipe.data.horizon + 1
        shape = PackShape(text=(CAPTION_TOKENS,) * count, vision=(vision,) * count, action=(actions,) * count)
        clips = count * 3 * actions * pixels
        tokens = CAPTION_TOKENS + vision + actions
        notes.append(
            f"a pack of {count} samples of {tokens:,} tokens: {CAPTION_TOKENS} of the caption, {vision:,} of the clip, "
            f"{actions} of state and actions"
        )
    memory = predict(
        config,
        shard=recipe.parallel.shards(ranks),
        averaged=recipe.ema is not None,
        frozen_dtype=torch.float32 if recipe.precision == "fp32" else torch.bfloat16,
        shape=shape,
        recomputed=_recomputed(recipe, config.num_hidden_layers),
        video_bytes=clips,
    )
    return "\n".join([memory.table(), *notes])


def _pack(recipe: Recipe, ranks: int) -> tuple[int, int, int]:
    """Samples of a rank's pack, latent patches of a sample, pixels of its canvas."""
    from models.cosmos3_policy.vision.canvas import latent_frames
    from models.cosmos3_policy.vision.compose import plan_canvas

    config, settings = model_config(recipe), processor_config(recipe)
    (part,) = parts(recipe)
    with open_part(recipe, part) as dataset:
        cameras = tuple((settings.views or {}).values()) or tuple(recipe.data.cameras or dataset.cameras)
        canvas = plan_canvas(settings.tier, [dataset.image_shape(camera) for camera in cameras])
    patch = config.latent_patch_size
    rows, columns = canvas.cropped_latent_size
    vision = latent_frames(settings.num_frames) * -(-rows // patch) * -(-columns // patch)
    count = recipe.data.batch_size or (recipe.data.global_batch_size or 0) // ranks
    if recipe.data.pack_tokens is not None:
        count = min(count, recipe.data.pack_tokens // (CAPTION_TOKENS + vision + settings.num_frames))
    return max(1, count), vision, canvas.size[0] * canvas.size[1]


def _recomputed(recipe: Recipe, layers: int) -> int:
    """Layers that recompute; of `selective` and `auto`, which decide by operation or when they run, all."""
    chosen = recipe.checkpointing
    if chosen.mode == "none":
        return 0
    if chosen.mode != "layers":
        return layers
    if chosen.last_k is not None:
        return chosen.last_k
    return -(-layers // chosen.every_k) if chosen.every_k is not None else len(chosen.layers or ())
