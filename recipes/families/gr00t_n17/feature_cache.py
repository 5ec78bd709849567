"""Kept outputs of the frozen backbone: a run's cache, under a key of all that they depend on."""

from typing import TYPE_CHECKING, Any

from recipes.check_data import parsed_size
from recipes.families.gr00t_n17.slots import model
from recipes.load import RecipeError
from recipes.parts import parts
from recipes.schema import Recipe

if TYPE_CHECKING:
    from models.gr00t_n17.feature_store import FeatureCache
    from models.gr00t_n17.network import GR00TN17

FOLDER = "features"


def build_feature_cache(
    recipe: Recipe, network: "GR00TN17", processor: Any, fingerprint: str, device_type: str
) -> "FeatureCache | None":
    """The cache of `model.feature_cache` in the folder of the data layer's caches; None where it is 0.

    Args:
        processor: of the run.
        fingerprint: of the data.
        device_type: on which the backbone runs.

    Raises:
        RecipeError: another pass over a sample would not give the same features.
    """
    limit = parsed_size(model(recipe).feature_cache)
    if not limit:
        return None
    from knonik.cache import cache_root
    from models.common.digest import weights_digest
    from models.gr00t_n17.feature_store import FeatureCache
    from models.gr00t_n17.features import cache_key, cache_problems

    if problems := cache_problems(processor.image_settings, network.backbone):
        raise RecipeError(problems)
    seen = [
        f"{part.cameras} {own.modalities.video} {own.modalities.video_deltas}"
        for part, own in zip(parts(recipe), processor.parts, strict=True)
    ]
    key = cache_key(
        weights=weights_digest(network.backbone.state_dict()),
        images=processor.image_settings,
        cameras=seen,
        data=[fingerprint, recipe.data.transport],
        precision=f"{recipe.precision} {model(recipe).precision}",
        device=device_type,
    )
    return FeatureCache(cache_root(recipe.data.cache.dir) / FOLDER, limit, key)
