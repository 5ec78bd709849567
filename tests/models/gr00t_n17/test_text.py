"""Instructions to prompt ids: clean-up, chat form, padding, vocabularies."""

import json
import logging
from pathlib import Path

import pytest

from models.gr00t_n17.config import BackboneConfig, GR00TN17Config
from models.gr00t_n17.inputs.text import PromptBuilder, ReleasedTokenizer, WordTokenizer, formalize, load_tokenizer

TINY = GR00TN17Config.tiny().backbone
TEXTS = ["Pick up the red block!", "pick up the blue block", "Don't touch it"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't STOP, now.", "dont stop now"),
        ("pick-up the_cup", "pickup the_cup"),
        ("Öffne  die Tür!\n", "öffne  die tür\n"),
        ("", ""),
    ],
)
def test_formalize(text: str, expected: str) -> None:
    assert formalize(text) == expected


def test_words_are_sorted_and_avoid_special_ids() -> None:
    tokenizer = WordTokenizer.from_texts(TEXTS, backbone=TINY)
    assert tokenizer.words == WordTokenizer.from_texts(reversed(TEXTS), backbone=TINY).words
    special = {v for k, v in vars(TINY).items() if k.endswith("_token_id")}
    assert not special & set(tokenizer.words.values())
    words = [word for word in tokenizer.words if word not in ("<unk>", "user", "\n")]
    assert words == sorted(["pick", "up", "the", "red", "block", "blue", "dont", "touch", "it"])


def test_word_tokenizer_survives_json() -> None:
    tokenizer = WordTokenizer.from_texts(TEXTS, backbone=TINY)
    again = load_tokenizer(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.encode("pick the blue block\n") == tokenizer.encode("pick the blue block\n")


def test_unknown_word_becomes_unk_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = WordTokenizer.from_texts(TEXTS, backbone=TINY)
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode("pick purple") == [tokenizer.words["pick"], tokenizer.words["<unk>"]]
        tokenizer.encode("pick purple")
    assert [record.getMessage() for record in caplog.records].count(caplog.records[0].getMessage()) == 1
    assert "purple" in caplog.text


def test_too_many_words_name_the_key_to_change() -> None:
    small = GR00TN17Config.tiny(backbone={"text": {"vocab_size": 12}}).backbone
    with pytest.raises(ValueError, match=r"9 different words.*room for 2.*vocab_size=12 must be at least 19"):
        WordTokenizer.from_texts(TEXTS, backbone=small)


def test_prompt_is_one_user_turn_with_images_first() -> None:
    tokenizer = WordTokenizer.from_texts(TEXTS, backbone=TINY)
    builder = PromptBuilder(tokenizer, TINY, formalize_language=True)
    w, b = tokenizer.words, TINY
    image = [b.vision_start_token_id, *[b.image_token_id] * 4, b.vision_end_token_id]
    other = [b.vision_start_token_id, *[b.image_token_id] * 2, b.vision_end_token_id]
    text = [w[word] for word in ("pick", "up", "the", "red", "block")]
    expected = [b.im_start_token_id, w["user"], w["\n"], *image, *other, *text, b.im_end_token_id, w["\n"]]
    assert builder.ids("Pick up the RED block!", [4, 2]).tolist() == expected


def test_padding_is_on_the_left_to_the_longest_or_to_a_fixed_length() -> None:
    builder = PromptBuilder(WordTokenizer.from_texts(TEXTS, backbone=TINY), TINY, formalize_language=True)
    ids, mask = builder.batch([TEXTS[0], TEXTS[2]], [4])
    longest = len(builder.ids(TEXTS[0], [4]))
    assert ids.shape == mask.shape == (2, longest)
    assert mask.tolist() == [[1] * longest, [0, 0] + [1] * (longest - 2)]
    assert (ids[mask == 0] == TINY.pad_token_id).all()
    assert ids[1, 2:].tolist() == builder.ids(TEXTS[2], [4]).tolist()
    fixed, fixed_mask = builder.batch([TEXTS[0], TEXTS[2]], [4], length=longest + 3)
    assert fixed.shape == (2, longest + 3)
    assert fixed[:, 3:].tolist() == ids.tolist()
    assert fixed_mask[:, :3].sum() == 0
    rounded, rounded_mask = builder.batch([TEXTS[0], TEXTS[2]], [4], multiple=8)
    assert rounded.shape == (2, 16)
    assert rounded[:, -longest:].tolist() == ids.tolist()
    assert rounded_mask[:, -longest:].tolist() == mask.tolist()
    assert builder.batch([TEXTS[0]], [4], multiple=longest)[0].shape == (1, longest)
    with pytest.raises(ValueError, match=r"prompt_length=5.*Pick up"):
        builder.batch([TEXTS[0]], [4], length=5)


def test_empty_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json.*processor\.tokenizer"):
        ReleasedTokenizer(str(tmp_path))


def test_released_tokenizer_from_a_folder_gives_the_ids_of_the_rendered_string(tmp_path: Path) -> None:
    """A byte-level BPE with the backbone's special tokens, made here: pieces encode as the whole string does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(["user\npick up the red block", "pick up the blue block"] * 4, trainer)
    raw.add_special_tokens([AddedToken(token, special=True) for token in special])
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path)
    names = ["pad", "im_start", "im_end", "vision_start", "vision_end", "image"]
    ids = {f"{n}_token_id": raw.token_to_id(token) for n, token in zip(names, special, strict=True)}
    tokenizer = ReleasedTokenizer(str(tmp_path))
    built = PromptBuilder(tokenizer, BackboneConfig(**ids), formalize_language=True).ids("Pick up the red block.", [3])
    rendered = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>"
        "pick up the red block<|im_end|>\n"
    )
    assert built.tolist() == raw.encode(rendered).ids
    assert load_tokenizer(tokenizer.to_dict()).encode("red") == tokenizer.encode("red")
