"""What of this model may run a micro-batch ahead: the backbone below its first trained layer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from models.gr00t_n17.feature_store import FeatureCache
from models.gr00t_n17.features import KEYS, cached_forward
from models.gr00t_n17.layers.backbone import BackboneFeatures, LowerFeatures
from models.gr00t_n17.network import GR00TN17


class Frozen(NamedTuple):
    """`share` is that of the samples for which the backbone ran; the others' features were kept."""

    features: BackboneFeatures | LowerFeatures
    share: float


def frozen_layers(network: GR00TN17) -> int:
    """Decoder layers below the first trained one; 0 where something below them is trained."""
    backbone = network.backbone
    model, layers = backbone.language_model, list(backbone.language_model.layers)
    below = [*backbone.visual.parameters(), *model.embed_tokens.parameters()]
    if any(parameter.requires_grad for parameter in below):
        return 0
    trained = [i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters())]
    return min([*trained, backbone.llm_grad_from, len(layers)])


def lookahead_problem(network: GR00TN17) -> str | None:
    """Why nothing of this network can run ahead, in one line; None where something can."""
    backbone, layers = network.backbone, len(network.backbone.language_model.layers)
    frozen = frozen_layers(network)
    if frozen == 0:
        trained = next((name for name, p in backbone.named_parameters() if p.requires_grad), "its first layer")
        return f"the backbone is trained ({trained}), so what it gives changes with every step"
    if frozen < layers and "compute" in vars(backbone):
        return (
            f"the backbone is compiled as one graph and its layers from {frozen} on are trained, so that it cannot be "
            "cut there; compile.scope=blocks can"
        )
    return None


def run_frozen(network: GR00TN17, cache: FeatureCache | None, whole: bool, inputs: Mapping[str, Any]) -> Frozen:
    """The backbone, `whole` or up to its first trained layer, or its kept features; draws no random numbers."""
    backbone = network.backbone
    if cache is not None:
        before = cache.misses
        features = cached_forward(backbone, cache, inputs, inputs[KEYS])
        return Frozen(features, (cache.misses - before) / len(inputs["position"]))
    run = backbone if whole else backbone.lower
    names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
    return Frozen(run(*(inputs[name] for name in names)), 1.0)
