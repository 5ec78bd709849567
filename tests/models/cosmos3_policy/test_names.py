"""The network's tensors are those of the released transformer, and every name has its twin in NVIDIA's framework."""

import json
from pathlib import Path

import pytest
import torch

from models.cosmos3_policy.checkpoint.names import from_framework, is_action_head, is_framework, to_framework
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.network import Cosmos3Policy

GOLDEN = json.loads((Path(__file__).parent / "golden" / "names.json").read_text())


@pytest.fixture(scope="module")
def released() -> Cosmos3Policy:
    with torch.device("meta"):
        return Cosmos3Policy(Cosmos3PolicyConfig())


def golden_names() -> dict[str, tuple[str, list[int]]]:
    """The framework's name and the shape of every tensor by its Diffusers name."""
    rows = {}
    for name, theirs, shape in GOLDEN["names"]:
        for layer in range(GOLDEN["layers"]) if "layers.N." in name else (0,):
            rows[name.replace("layers.N.", f"layers.{layer}.")] = theirs.replace("layers.N.", f"layers.{layer}."), shape
    return rows


def test_counts_of_the_released_shape(released: Cosmos3Policy) -> None:
    """Figures of the released transformer without vision encoder and sound, and of what its policy recipe trains."""
    counts = {p.requires_grad: 0 for p in released.parameters()}
    for parameter in released.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    assert sum(counts.values()) == GOLDEN["parameters"] == 15_173_136_576
    assert counts[True] == 6_982_401_216


def test_names_and_shapes_are_those_of_diffusers(released: Cosmos3Policy) -> None:
    golden = golden_names()
    assert len(golden) == GOLDEN["tensors"]
    assert {name: list(t.shape) for name, t in released.state_dict().items()} == {n: s for n, (_, s) in golden.items()}


def test_every_name_has_one_twin_in_the_framework() -> None:
    golden = golden_names()
    theirs = {name: to_framework(name) for name in golden}
    assert theirs == {name: twin for name, (twin, _) in golden.items()}
    assert len(set(theirs.values())) == len(golden)
    assert {from_framework(twin): twin for twin in theirs.values()} == theirs
    for prefix in ("net.", "net_ema.", "model.net."):
        assert [from_framework(prefix + twin) for twin in theirs.values()] == list(golden)
        assert all(is_framework(prefix + twin) for twin in theirs.values())
    assert not any(is_framework(name) for name in golden)


def test_wrappers_of_compiled_and_checkpointed_layers_do_not_matter() -> None:
    name = "net.language_model.model.layers.3._checkpoint_wrapped_module._orig_mod.self_attn.q_norm_moe_gen.weight"
    assert from_framework(name) == "layers.3.self_attn.norm_added_q.weight"


@pytest.mark.parametrize(
    "name",
    [
        "net.language_model.model.layers.0.self_attn.k_norm_und_for_gen.weight",
        "net.language_model.model.rotary.weight",
        "net.latent_pos_embed.seq",
    ],
)
def test_a_tensor_that_the_policy_has_not_is_told(name: str) -> None:
    with pytest.raises(ValueError, match=r"attention has no part|no tensor of the policy"):
        from_framework(name)
    with pytest.raises(ValueError, match="no tensor of a Cosmos-3 transformer"):
        to_framework("time_proj.weight")


def test_action_heads_are_what_upstream_skips_in_a_warm_start() -> None:
    skipped = [n for n, (twin, _) in golden_names().items() if twin.startswith(("action2llm", "llm2action", "action_"))]
    assert [name for name in golden_names() if is_action_head(name)] == skipped
    assert len(skipped) == 5
