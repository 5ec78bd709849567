"""A checkpoint in the released layout: read by name, exported, read again, with nothing lost on the way."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.common.shards import save_checkpoint_weights
from models.common.stored import StoredTensors
from models.gr00t_n17.checkpoint.export import export
from models.gr00t_n17.checkpoint.folder import CheckpointFolder, weight_files
from models.gr00t_n17.checkpoint.model_card import CardFacts, model_card
from models.gr00t_n17.checkpoint.weights import load_weights
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.inputs.processor import Processor
from models.gr00t_n17.inputs.text import WordTokenizer
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.precision import weight_dtypes

Write = Callable[..., Path]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))
        for name in a
    )


def loaded(folder: Path, mode: str = "stock", slots: tuple[int, ...] | None = None) -> GR00TN17:
    with torch.device("meta"):
        network = GR00TN17(CheckpointFolder(folder).config, slots=slots)
    load_weights(network, folder, dtypes=weight_dtypes(network, mode))
    return network


def processor(folder: Path, tag: str = "new_embodiment") -> Processor:
    opened = CheckpointFolder(folder)
    words = WordTokenizer.from_texts(["pick up the block"], backbone=opened.config.backbone)
    return Processor.from_checkpoint(opened, embodiment=tag, tokenizer=words)


@pytest.mark.parametrize(
    ("mode", "slots", "lm_head"), [("stock", None, False), ("lean", (10,), True), ("bf16", None, False)]
)
def test_load_export_load_is_exact(
    write_checkpoint: Write, tmp_path: Path, mode: str, slots: tuple[int, ...] | None, lm_head: bool
) -> None:
    source = write_checkpoint(tmp_path / "base", lm_head=lm_head)
    network = loaded(source, mode, slots)
    export(
        network, processor(source), tmp_path / "out", base=CheckpointFolder(source), recipe={"a": 1}, shard_bytes=3e5
    )
    assert equal(tensors(source), tensors(tmp_path / "out"))
    before, after = CheckpointFolder(source), CheckpointFolder(tmp_path / "out")
    assert after.config_values == before.config_values
    assert after.config == before.config
    assert json.loads((tmp_path / "out/experiment_cfg/recipe.json").read_text()) == {"a": 1}
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(source).values())
    assert len(set(index["weight_map"].values())) > 4
    again = loaded(tmp_path / "out", mode, slots)
    for (name, a), (_, b) in zip(network.state_dict().items(), again.state_dict().items(), strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name


def test_side_files_keep_what_is_not_ours(tiny_checkpoint: Path, tmp_path: Path) -> None:
    before = CheckpointFolder(tiny_checkpoint)
    export(loaded(tiny_checkpoint), processor(tiny_checkpoint), tmp_path / "out", base=before)
    after = CheckpointFolder(tmp_path / "out")
    assert before.processor is not None
    assert after.processor is not None
    for key, value in before.processor.items():
        if key != "modality_configs":
            assert after.processor[key] == value, key
    for tag, config in before.processor["modality_configs"].items():
        for modality, section in config.items():
            kept = {key: after.processor["modality_configs"][tag][modality][key] for key in section}
            assert kept == section, (tag, modality)
    assert after.statistics == before.statistics
    assert after.stored_embodiment_ids.items() >= before.stored_embodiment_ids.items()
    assert after.embodiment_ids == before.embodiment_ids
    a, b = (processor(folder).to_dict() for folder in (tiny_checkpoint, tmp_path / "out"))
    assert a == b


def test_trained_tensors_are_written_and_all_others_left_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Of a trained slot only its own rows change; float32 in the export keeps every bit of what was trained."""
    network = loaded(tiny_checkpoint, "lean", (2, 10))
    decoder, proj = "action_head.action_decoder.layer2.W", "action_head.model.proj_out_2.weight"
    with torch.no_grad():
        network.get_parameter(decoder)[1] += 1 / 3
        network.get_parameter(proj).mul_(1 / 3)
    base = CheckpointFolder(tiny_checkpoint)
    export(network, processor(tiny_checkpoint), tmp_path / "out", dtype="float32", base=base)
    before, after = tensors(tiny_checkpoint), tensors(tmp_path / "out")
    assert {name for name in before if not torch.equal(before[name].float(), after[name])} == {decoder, proj}
    rows = [row for row in range(32) if not torch.equal(before[decoder][row].float(), after[decoder][row])]
    assert rows == [10]
    assert torch.equal(after[decoder][10], network.get_parameter(decoder)[1])
    assert torch.equal(after[proj], network.get_parameter(proj))
    assert CheckpointFolder(tmp_path / "out").config_values["torch_dtype"] == "float32"
    with pytest.raises(ValueError, match=r"slots \(2, 10\) alone"):
        export(network, processor(tiny_checkpoint), tmp_path / "other")
    with pytest.raises(FileExistsError, match="not empty"):
        export(network, processor(tiny_checkpoint), tmp_path / "out", base=base)
    with pytest.raises(ValueError, match="bfloat16, float32"):
        export(network, processor(tiny_checkpoint), tmp_path / "other", dtype="int8", base=base)
    assert not (tmp_path / "other").exists()


def test_a_frozen_tensor_stored_wider_than_it_is_held_is_written_from_the_base(
    write_checkpoint: Write, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "base", dtype=torch.float32)
    export(
        loaded(source, "lean", (10,)),
        processor(source),
        tmp_path / "out",
        dtype="float32",
        base=CheckpointFolder(source),
    )
    assert equal(tensors(source), tensors(tmp_path / "out"))


def test_the_files_architecture_wins_over_every_default(write_checkpoint: Write, tmp_path: Path) -> None:
    """A class may say 12 language layers and 16 blocks; the file says 16 and 32, and so do its weights."""
    assert (GR00TN17Config.tiny().select_layer, GR00TN17Config.tiny().diffusion_model_cfg.num_layers) == (2, 4)
    written = CheckpointFolder(write_checkpoint(tmp_path / "shape"))
    values = written.config_values
    sizes = {**values["backbone"], "text": {**values["backbone"]["text"], "num_hidden_layers": 28}}
    deep = {"select_layer": 16, "diffusion_model_cfg": {**values["diffusion_model_cfg"], "num_layers": 32}}
    source = write_checkpoint(tmp_path / "deep", config={**deep, "backbone": sizes})
    network = loaded(source)
    assert len(network.backbone.language_model.layers) == 16
    assert len(network.action_head.model.transformer_blocks) == 32
    shallow = {"select_layer": 12, "diffusion_model_cfg": {**values["diffusion_model_cfg"], "num_layers": 16}}
    with torch.device("meta"):
        other = GR00TN17(GR00TN17Config.from_dict({**values, **shallow, "backbone": sizes}))
    with pytest.raises(ValueError, match=r"unexpected \(268\)") as caught:
        load_weights(other, source)
    for name in (
        "action_head.model.transformer_blocks.{16-31}.ff",
        "language_model.layers.{12-15}.mlp",
    ):
        assert f"  {name}" in str(caught.value).replace("backbone.model.model.", "")
    assert all(parameter.is_meta for parameter in other.parameters()), "nothing is placed when names do not fit"


def test_names_and_shapes_are_the_released_ones(tensor_shapes: Callable[[dict], dict[str, tuple[int, ...]]]) -> None:
    config = GR00TN17Config()
    with torch.device("meta"):
        network = GR00TN17(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert shapes == tensor_shapes(config.to_dict())
    assert len(shapes) == 1030


def test_parameters_land_on_the_device_in_the_dtype_that_is_asked(tiny_checkpoint: Path) -> None:
    with torch.device("meta"):
        network = GR00TN17(CheckpointFolder(tiny_checkpoint).config, slots=(1,))
    name, table = "action_head.state_encoder.layer1.W", "backbone.model.model.language_model.embed_tokens.weight"
    trained = {n for n, p in network.named_parameters() if p.requires_grad}
    load_weights(network, tiny_checkpoint, dtypes={table: torch.bfloat16})
    assert {n for n, p in network.named_parameters() if p.requires_grad} == trained
    assert {n for n, p in network.named_parameters() if p.dtype != torch.float32} == {table}
    stored = tensors(tiny_checkpoint)
    assert torch.equal(network.get_parameter(name), stored[name][1:2].float())
    assert torch.equal(network.get_parameter(table), stored[table])
    assert not any(t.is_meta for t in network.state_dict().values())
    before = network.get_parameter(table).data_ptr()
    load_weights(network, tiny_checkpoint)
    assert network.get_parameter(table).data_ptr() == before, "what fits is filled in place"


def test_an_untied_head_is_told_and_ignored(
    write_checkpoint: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_checkpoint(tmp_path, lm_head=True)
    loaded(source)
    assert "lm_head" not in caplog.text
    file = weight_files(source)[0]
    values = load_file(file)
    (head,) = (name for name in tensors(source) if name.endswith("lm_head.weight"))
    for file in weight_files(source):
        values = load_file(file)
        values.pop(head, None)
        save_file(values, file)
    save_file({head: tensors(source)["backbone.model.model.language_model.embed_tokens.weight"] + 1}, source / "h.st")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"][head] = "h.st"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING):
        loaded(source)
    assert caplog.text.count("differs from the token embedding") == 1


def test_a_folder_is_read_with_errors_that_name_file_and_key(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint folder"):
        CheckpointFolder(tmp_path / "absent")
    (tmp_path / "libero_10").mkdir()
    (tmp_path / "libero_10/config.json").write_text("{")
    with pytest.raises(FileNotFoundError, match="name one of its folders: libero_10"):
        CheckpointFolder(tmp_path)
    nested = CheckpointFolder(tmp_path / "libero_10")
    with pytest.raises(ValueError, match=r"libero_10/config\.json is not readable JSON"):
        _ = nested.config
    (tmp_path / "libero_10/config.json").write_text('{"use_alternate_vl_dit": false}')
    with pytest.raises(ValueError, match=r"config\.json: .*\n.*use_alternate_vl_dit = False"):
        _ = CheckpointFolder(tmp_path / "libero_10").config
    (tmp_path / "libero_10/processor_config.json").write_text('{"processor_kwargs": 3}')
    with pytest.raises(ValueError, match=r"processor_config\.json: key processor_kwargs is 3"):
        _ = nested.processor
    (tmp_path / "libero_10/embodiment_id.json").write_text('{"new_embodiment": "10"}')
    with pytest.raises(ValueError, match=r"embodiment_id\.json: slots must be integers"):
        _ = nested.embodiment_ids
    assert nested.statistics is None
    opened = CheckpointFolder(tiny_checkpoint)
    assert opened.embodiment_ids["robot_of_a_later_version"] == 29
    assert opened.embodiment_ids["unitree_g1_sonic"] == 11, "tags the file does not name come from the released table"
    assert len(opened.files) == 3


def test_a_cut_shard_and_a_name_stored_twice_are_named(write_checkpoint: Write, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path)
    first, second, _ = weight_files(source)
    body = first.read_bytes()
    first.write_bytes(body[:-100])
    with pytest.raises(ValueError, match=r"model-00001-of-00003\.safetensors is not a whole safetensors file"):
        StoredTensors(source)
    first.write_bytes(body)
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: load_file(first)[name]}, second)
    with pytest.raises(ValueError, match=r"is stored twice, in .*model-00001-of-00003\.safetensors and"):
        StoredTensors(source)


def test_weights_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def values(count: int, fail: bool = False) -> Any:
        for i in range(count):
            yield f"t{i}", torch.full((100,), float(i))
        if fail:
            raise OSError("disk full")

    save_checkpoint_weights(values(10), tmp_path, shard_bytes=1000)
    assert len(weight_files(tmp_path)) == 5
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint_weights(values(4, fail=True), tmp_path, shard_bytes=1000)
    assert len(tensors(tmp_path)) == 10
    save_checkpoint_weights(values(3), tmp_path, dtype=torch.bfloat16, shard_bytes=1e9)
    assert [file.name for file in weight_files(tmp_path)] == ["model-00001-of-00001.safetensors"]
    assert {file.name for file in tmp_path.iterdir()} == {
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    }
    with pytest.raises(ValueError, match="t0 comes twice"):
        save_checkpoint_weights([*values(1), *values(1)], tmp_path)


def test_the_model_card_says_facts_only() -> None:
    facts = CardFacts(name="blocks", embodiments={"new_embodiment": 10}, dtype="bfloat16", steps=12000)
    text = model_card(facts)
    assert "| optimizer steps | 12,000 |" in text
    assert "base_model" not in text
    assert "random weights" in text
    figures = {"loss_last": 0.25, "success_rate": None}
    text = model_card(
        CardFacts(**{**vars(facts), "base": "nvidia/GR00T-N1.7-3B", "changes": {"a.b": "x|y"}, "summary": figures})
    )
    assert "base_model: nvidia/GR00T-N1.7-3B" in text
    assert '| `a.b` | `"x\\|y"` |' in text
    assert "| training loss, last 5 % of steps | 0.2500 |" in text
    assert "success" not in text
