"""Prompt ids against the Qwen3-VL processor of transformers, with a small released tokenizer (golden file)."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.common.resample import multiple_size
from models.gr00t_n17.config import BackboneConfig
from models.gr00t_n17.inputs.text import PromptBuilder, ReleasedTokenizer

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text())
FIELDS = {"pad_token_id": "endoftext", "image_token_id": "image_pad"} | {
    f"{name}_token_id": name for name in ("im_start", "im_end", "vision_start", "vision_end")
}


def backbone(**changes: int) -> BackboneConfig:
    return BackboneConfig(**{field: GOLDEN["ids"][name] for field, name in FIELDS.items()} | changes)


def tokenizer(folder: Path, template: str | None, *, beside: bool = False) -> ReleasedTokenizer:
    """The tokenizer from a folder; its template in its own file, or `beside` it where processors keep theirs."""
    (folder / "tokenizer.json").write_text(json.dumps(GOLDEN["tokenizer"]))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"}
    if template is not None and not beside:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    if template is not None and beside:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return ReleasedTokenizer(str(folder))


@pytest.mark.parametrize("kept", ["tokenizer", "processor", "nowhere"])
def test_ids_and_masks_equal_the_processor_of_transformers(tmp_path: Path, kept: str) -> None:
    """With the tokenizer's own chat template, wherever it is kept, and with the built-in form: equal ids."""
    template = None if kept == "nowhere" else GOLDEN["chat_template"]
    made = tokenizer(tmp_path, template, beside=kept == "processor")
    assert made.chat_template == template
    for batch in GOLDEN["batches"]:
        builder = PromptBuilder(made, backbone(), formalize_language=batch["cleaned"])
        grids = [multiple_size(*size, factor=32, min_pixels=65536, max_pixels=16777216) for size in batch["sizes"]]
        assert [[1, height // 16, width // 16] for height, width in grids] == batch["grids"]
        input_ids, attention_mask = builder.batch(batch["texts"], [h * w // 1024 for h, w in grids])
        assert input_ids.tolist() == batch["input_ids"]
        assert attention_mask.tolist() == batch["attention_mask"]


def test_rendered_bytes_equal_those_of_transformers(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, GOLDEN["chat_template"])
    for batch in GOLDEN["batches"]:
        if not batch["cleaned"]:
            rendered = [made.render(text, len(batch["sizes"])) for text in batch["texts"]]
            assert rendered == batch["rendered"]


def test_another_template_is_followed(tmp_path: Path) -> None:
    """The checkpoint's tokenizer decides: here one that opens with a system turn."""
    template = "{{ '<|im_start|>system\\n<|im_end|>\\n' }}" + GOLDEN["chat_template"]
    made = tokenizer(tmp_path, template)
    b = backbone()
    ids = PromptBuilder(made, b, formalize_language=True).ids("red", [2]).tolist()
    start = [b.im_start_token_id, *made.encode("system\n"), b.im_end_token_id, *made.encode("\n")]
    assert ids[: len(start)] == start
    assert ids[len(start) :] == [
        *[b.im_start_token_id, *made.encode("user\n"), b.vision_start_token_id],
        *[b.image_token_id] * 2,
        *[b.vision_end_token_id, *made.encode("red"), b.im_end_token_id, *made.encode("\n")],
    ]


def test_a_template_without_images_is_refused(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, "{{ messages[0].content[-1].text }}")
    with pytest.raises(ValueError, match=r"0 image tokens .*for 1 images"):
        PromptBuilder(made, backbone(), formalize_language=True).ids("red", [4])


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, None)
    with pytest.raises(ValueError, match=r"image_token_id=3 is .*<\|image_pad\|>.*processor\.tokenizer"):
        PromptBuilder(made, backbone(image_token_id=3), formalize_language=True)
