"""Make prompts.json: token ids of the Qwen3-VL processor of transformers with a small tokenizer made here.

Run in an environment of its own:
    python -m venv golden
    golden/bin/pip install "transformers==5.5.4" torch torchvision jinja2
    golden/bin/python tests/models/gr00t_n17/golden/make_prompts.py
"""

import json
import re
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

OUT = Path(__file__).with_name("prompts.json")
SPECIAL = ["endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad"]
TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{{ '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
BATCHES = [
    {"texts": ["Pick up the red block."], "sizes": [[256, 340]]},
    {"texts": ["Pick up the red block.", "Don't stop!"], "sizes": [[256, 340], [256, 340], [256, 340]]},
    {"texts": ["a", "Öffne die Tür, bitte", "  two  spaces\nand_lines "], "sizes": [[256, 256], [256, 455]]},
    {"texts": ["", "put (both) red-blocks in the box #1"], "sizes": [[97, 200], [300, 120], [64, 64]]},
    {"texts": ["把红色的方块拿起来。", "move 2.5 cm to the left; then wait…"], "sizes": [[256, 340]] * 4},
]


def make_processor() -> Qwen3VLProcessor:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(["user\npick up the red block", "dont stop the blue block"] * 4, trainer)
    raw.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<|endoftext|>", chat_template=TEMPLATE, padding_side="left"
    )
    images = Qwen2VLImageProcessor(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 65536, "longest_edge": 16777216},
    )
    return Qwen3VLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=Qwen3VLVideoProcessor(), chat_template=TEMPLATE
    )


def main() -> None:
    processor = make_processor()
    batches = []
    for batch in BATCHES:
        frames = [np.zeros((*size, 3), dtype=np.uint8) for size in batch["sizes"]]
        for cleaned in (True, False):
            texts = [re.sub(r"[^\w\s]", "", text.lower()) if cleaned else text for text in batch["texts"]]
            content = [{"type": "image", "image": image} for image in frames]
            rendered = [
                processor.apply_chat_template(
                    [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
                    tokenize=False,
                    add_generation_prompt=False,
                )
                for text in texts
            ]
            encoded = processor(text=rendered, images=frames * len(texts), return_tensors="np", padding=True)
            batches.append(
                {
                    **batch,
                    "cleaned": cleaned,
                    "rendered": rendered,
                    "input_ids": encoded["input_ids"].tolist(),
                    "attention_mask": encoded["attention_mask"].tolist(),
                    "grids": encoded["image_grid_thw"][: len(frames)].tolist(),
                }
            )
    ids = {name: processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in SPECIAL}
    content = {
        "tokenizer": json.loads(processor.tokenizer.backend_tokenizer.to_str()),
        "chat_template": TEMPLATE,
        "ids": ids,
        "batches": batches,
    }
    OUT.write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
