"""Starting weights by either layout, what a warm start leaves fresh, and exports that other readers understand."""

import dataclasses
import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.common.digest import weights_digest
from models.common.ema import Ema
from models.common.step_options import EmaConfig
from models.common.trained import load_trained
from models.cosmos3_policy.checkpoint.export import export
from models.cosmos3_policy.checkpoint.folder import CheckpointFolder
from models.cosmos3_policy.checkpoint.model_card import CardFacts, model_card
from models.cosmos3_policy.checkpoint.names import is_action_head, to_framework
from models.cosmos3_policy.checkpoint.weights import cast_frozen, fresh_action_heads, load_weights
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.packed import Packed

CONFIG = Cosmos3PolicyConfig.tiny(vocab_size=64)


def build(seed: int | None = None, config: Cosmos3PolicyConfig = CONFIG) -> Cosmos3Policy:
    with torch.device("meta"):
        network = Cosmos3Policy(config)
    if seed is not None:
        network.to_empty(device="cpu")
        network.init_weights(seed)
    return network


def parts(network: Cosmos3Policy, heads: bool) -> dict[str, Tensor]:
    return {name: value for name, value in network.state_dict().items() if is_action_head(name) is heads}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A released repository in small, in bfloat16, with the parts a policy has not: sound and an encoder of images."""
    folder = tmp_path / "released"
    export(build(1), folder, shard_bytes=200_000)
    transformer = folder / "transformer"
    index = json.loads((transformer / "diffusion_pytorch_model.safetensors.index.json").read_text())
    save_file({"audio_proj_in.weight": torch.ones(2, 2)}, transformer / "sound.safetensors")
    index["weight_map"]["audio_proj_in.weight"] = "sound.safetensors"
    (transformer / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((transformer / "config.json").read_text()) | {"sound_gen": False, "made_by": "a test"}
    (transformer / "config.json").write_text(json.dumps(config))
    for name, text in (("vae/config.json", "{}"), ("text_tokenizer/tokenizer.json", "{}"), ("model_index.json", "{}")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    return folder


def test_a_warm_start_takes_everything_but_the_action_heads(repository: Path) -> None:
    network, source = build(), build(1)
    load_weights(network, repository, seed=7)
    rounded = {name: value.bfloat16().float() for name, value in source.state_dict().items()}
    for name, value in parts(network, heads=False).items():
        assert torch.equal(value, rounded[name]), name
        assert value.dtype == torch.float32
    fresh = fresh_action_heads(CONFIG, 7)
    assert weights_digest(parts(network, heads=True)) == weights_digest(fresh)
    assert all(value.requires_grad for name, value in network.named_parameters() if is_action_head(name))
    assert not any(torch.equal(fresh[name], rounded[name]) for name in fresh if not name.endswith("bias.weight"))


@pytest.mark.parametrize("frozen_dtype", [None, torch.bfloat16])
def test_a_load_holds_the_network_and_one_tensor(repository: Path, frozen_dtype: torch.dtype | None) -> None:
    """Counted by the allocator, what lives for the length of one operation included, and the file that is mapped."""
    mapped = max(file.stat().st_size for file in (repository / "transformer").glob("*.safetensors"))
    network = build()
    gc.collect()  # what earlier tests have left would be freed meanwhile, and count as given back
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        load_weights(network, repository, keep_action_heads=True, frozen_dtype=frozen_dtype)
    taken = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            peak = max(peak, taken)
    sizes = [parameter.numel() * parameter.element_size() for parameter in network.parameters()]
    assert sum(sizes) <= peak <= sum(sizes) + max(sizes) + mapped
    assert mapped < sum(sizes) / 2


def test_fresh_heads_are_the_networks_own_and_move_no_generator() -> None:
    network = build(1)
    network.reset_action_heads(torch.Generator().manual_seed(7))
    state = torch.get_rng_state()
    fresh = fresh_action_heads(CONFIG, 7)
    assert torch.equal(torch.get_rng_state(), state)
    assert weights_digest(parts(network, heads=True)) == weights_digest(fresh)
    wide = fresh_action_heads(Cosmos3PolicyConfig.tiny(action_dim=64, hidden_size=256, num_embodiment_domains=32), 0)
    for name, fan_in in (("action_proj_in.fc.weight", 64), ("action_proj_out.fc.weight", 256)):
        assert wide[name].std() == pytest.approx(0.9866 * fan_in**-0.5, rel=0.01)  # of a normal cut at three
        assert wide[name].abs().max() <= 3 * fan_in**-0.5
    assert not wide["action_proj_in.bias.weight"].any()
    assert not wide["action_proj_out.bias.weight"].any()


def test_action_heads_stay_on_request(repository: Path) -> None:
    network = build()
    load_weights(network, repository, keep_action_heads=True)
    rounded = {name: value.bfloat16().float() for name, value in build(1).state_dict().items()}
    assert weights_digest(network.state_dict()) == weights_digest(rounded)


def test_a_base_without_action_heads_gives_fresh_ones_and_cannot_keep_them(tmp_path: Path) -> None:
    base = build(1, Cosmos3PolicyConfig.tiny(vocab_size=64, action_gen=False))
    export(base, tmp_path / "base")
    network = build()
    with pytest.raises(ValueError, match=r"no action heads to keep: set model\.keep_action_heads"):
        load_weights(network, tmp_path / "base", keep_action_heads=True)
    assert all(parameter.is_meta for parameter in network.parameters())
    load_weights(network, tmp_path / "base", seed=3)
    assert weights_digest(parts(network, heads=True)) == weights_digest(fresh_action_heads(CONFIG, 3))


def test_fresh_heads_that_are_not_trained_are_refused(repository: Path) -> None:
    network = build()
    network.action_proj_out.requires_grad_(False)
    with pytest.raises(ValueError, match=r"would stay random: action_proj_out\.fc\.weight, action_proj_out\.bias"):
        load_weights(network, repository)


def test_all_that_does_not_fit_is_told_at_once_and_nothing_is_changed(repository: Path) -> None:
    wrong = build(1, Cosmos3PolicyConfig.tiny(vocab_size=65, num_hidden_layers=3))
    before = weights_digest(wrong.state_dict())
    with pytest.raises(ValueError, match="do not fit the network") as raised:
        load_weights(wrong, repository)
    text = str(raised.value)
    assert "embed_tokens.weight: stored (64, 64), network (65, 64)" in text
    assert "layers.2.self_attn.to_add_out.weight" in text
    assert "audio" not in text
    assert weights_digest(wrong.state_dict()) == before


@pytest.mark.parametrize(("name", "words"), [(5, "by text, not by 5"), ("../vae/x.safetensors", "outside its folder")])
def test_an_index_that_names_no_file_beside_it_is_refused(repository: Path, name: object, words: str) -> None:
    file = repository / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["norm.weight"] = name
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=words):
        load_weights(build(), repository)


def some_pack() -> Packed:
    return Packed(
        text_ids=torch.arange(19),
        text_lengths=(7, 12),
        latents=torch.randn(2, 4, 3, 5, 6, generator=torch.Generator().manual_seed(0)),
        vision_noisy=torch.arange(3).expand(2, -1) > 0,
        action=torch.zeros(2, 5, CONFIG.action_dim),
        action_noisy=torch.arange(5).expand(2, -1) > 0,
        sigma=torch.tensor([0.3, 0.9]),
        fps=(15.0, 15.0),
    )


def test_frozen_weights_in_bfloat16_change_nothing_where_it_is_computed_in(repository: Path) -> None:
    """Not from a rounded checkpoint: a cast of the random weights loses bits that no product would have seen."""
    network, narrow = build(5), build(5)
    cast_frozen(narrow, torch.bfloat16)
    assert {p.dtype for p in narrow.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in narrow.parameters() if not p.requires_grad} == {torch.bfloat16}
    results = []
    for each in (network, narrow):
        with torch.autocast("cpu", torch.bfloat16):
            velocity = each(some_pack())
        assert isinstance(velocity.action, Tensor)
        assert isinstance(velocity.vision, Tensor)
        (velocity.vision.square().sum() + velocity.action.square().sum()).backward()
        gradients = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        results.append((weights_digest({"v": velocity.vision, "a": velocity.action}), weights_digest(gradients)))
    assert results[0] == results[1]
    loaded = build()
    load_weights(loaded, repository, frozen_dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_an_export_is_the_base_but_for_what_was_trained(repository: Path, tmp_path: Path) -> None:
    base, network = CheckpointFolder(repository), build()
    load_weights(network, repository, keep_action_heads=True)
    with torch.no_grad():
        network.layers[1].mlp_moe_gen.up_proj.weight.mul_(1.5)
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text('{"z_dim": 48}')
    more = {"processor": {"tier": "480"}, "recipe": {"seed": 1}, "card": "# card\n"}
    export(network, tmp_path / "out", base=base, vae=tmp_path / "encoder", **more)
    written = {}
    for file in sorted((tmp_path / "out" / "transformer").glob("*.safetensors")):
        written |= load_file(file)
    original = {}
    for file in sorted((repository / "transformer").glob("*.safetensors")):
        original |= load_file(file)
    assert set(written) == set(original)  # sound included, which the policy has not
    changed = [name for name in written if not torch.equal(written[name], original[name].to(written[name].dtype))]
    assert changed == ["layers.1.mlp_moe_gen.up_proj.weight"]
    config = json.loads((tmp_path / "out" / "transformer" / "config.json").read_text())
    assert config["made_by"] == "a test"
    assert config["_class_name"] == "Cosmos3OmniTransformer"
    names = {file.relative_to(tmp_path / "out").as_posix() for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert {"vae/config.json", "text_tokenizer/tokenizer.json", "model_index.json", "README.md"} <= names
    assert "model.safetensors.index.json" not in names  # it would speak of the base's weights
    again = CheckpointFolder(tmp_path / "out")
    assert again.processor == {"tier": "480"}
    assert again.vae == tmp_path / "out" / "vae"
    assert (again.vae / "config.json").read_text() == '{"z_dim": 48}'  # the run's own, not the base's
    assert again.tokenizer == tmp_path / "out" / "text_tokenizer"
    assert again.config is not None
    assert dataclasses.replace(again.config, extra={}) == network.config


def test_averages_of_a_run_are_exported_in_the_place_of_its_weights(repository: Path, tmp_path: Path) -> None:
    network = build()
    load_weights(network, repository)
    ema = Ema(EmaConfig(kind="constant", decay=0.5))
    ema.track(network)
    start = {name: p.detach().clone() for name, p in network.named_parameters() if p.requires_grad}
    assert {name for name, _ in ema.named_parameters()} == set(start)  # averages of what is trained alone
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    ema.update(1)
    averages = {f"ema.{name}": value.detach() for name, value in ema.named_parameters()}
    load_trained(network, {"state_dict": averages}, prefix="ema.")
    export(network, tmp_path / "out", dtype="float32", base=CheckpointFolder(repository))
    again = build()
    load_weights(again, tmp_path / "out", keep_action_heads=True)
    for name, parameter in again.named_parameters():
        if name in start:
            assert torch.allclose(parameter, start[name] + 0.5, atol=1e-6)


@pytest.mark.parametrize("layout", ["model.net.", "net.", ""])
def test_safetensors_with_the_frameworks_names_are_read(layout: str, tmp_path: Path) -> None:
    source = build(1)
    state = {f"{layout}{to_framework(name)}": value for name, value in source.state_dict().items()}
    state[f"{layout}language_model.visual.patch_embed.proj.weight"] = torch.zeros(2)
    state[f"{layout}sound2llm.weight"] = torch.zeros(2)
    save_file(state, tmp_path / "model.safetensors")
    network = build()
    load_weights(network, tmp_path, keep_action_heads=True)
    assert weights_digest(network.state_dict()) == weights_digest(source.state_dict())


def test_two_tensors_of_one_meaning_are_refused(tmp_path: Path) -> None:
    source = build(1).state_dict()
    save_file({**source, "net.vae2llm.bias": source["proj_in.bias"].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"net\.vae2llm\.bias are the same tensor|the same tensor, proj_in\.bias"):
        load_weights(build(), tmp_path)


def test_diffusers_reads_an_export(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", exc_type=ImportError)
    network = build(1)
    export(network, tmp_path / "out", dtype="float32", shard_bytes=100_000)
    read: Callable = diffusers.Cosmos3OmniTransformer.from_pretrained
    theirs = read(tmp_path / "out", subfolder="transformer", torch_dtype=torch.float32)
    assert weights_digest(theirs.state_dict()) == weights_digest(network.state_dict())


def test_the_card_says_what_a_server_must_know() -> None:
    facts = CardFacts(
        name="droid",
        dtype="bfloat16",
        steps=10_000,
        base="nvidia/Cosmos3-Nano",
        domain=8,
        horizon=32,
        fps=15,
        prompt="json",
        averaged=True,
    )
    text = model_card(facts)
    for line in (
        "base_model: nvidia/Cosmos3-Nano",
        "| robot's slot of the action heads | 8 |",
        "| chunk | 32 actions at 15 a second |",
        "| prompt format | json |",
        "| weights | averaged over the steps |",
        "| optimizer steps | 10,000 |",
    ):
        assert line in text.splitlines()
