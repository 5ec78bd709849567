"""Token ids of prompts: the chat form, the two closing tokens, the closed vocabulary and a released tokenizer."""

from pathlib import Path

import pytest
import torch

from models.cosmos3_policy.inputs.text import ReleasedTokenizer, TextIds, WordTokenizer, load_tokenizer

PROMPT = '{"description": "Put 12 pens away.", "fps": 15.0}'
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A repository in Diffusers' layout with a byte-level tokenizer of a few special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = pre_tokenizers.ByteLevel.alphabet()
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(letters))}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|vision_start|>", "<|vision_end|>"],
        chat_template=TEMPLATE,
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def test_a_released_tokenizer_beside_the_weights_makes_one_user_turn(released: Path) -> None:
    tokenizer = ReleasedTokenizer(str(released))
    text = TextIds(tokenizer, max_tokens=4096)
    ids = text.ids(PROMPT).tolist()
    decoded = tokenizer._tokenizer.decode(ids)
    assert decoded == f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n<|im_end|><|vision_start|>"
    dropped = text.ids("").tolist()
    assert tokenizer._tokenizer.decode(dropped) == (
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|><|vision_start|>"
    )
    assert load_tokenizer(tokenizer.to_dict()).chat(PROMPT) == tokenizer.chat(PROMPT)


def test_without_a_template_the_form_is_the_same(released: Path) -> None:
    with_template = ReleasedTokenizer(str(released)).chat(PROMPT)
    for path in (released / "tokenizer").glob("chat_template*"):
        path.unlink()
    assert ReleasedTokenizer(str(released)).chat(PROMPT) == with_template


def test_a_folder_without_a_tokenizer_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"processor\.tokenizer=words"):
        ReleasedTokenizer(str(tmp_path))


def test_long_prompts_are_cut_and_closed(released: Path) -> None:
    tokenizer = ReleasedTokenizer(str(released))
    whole, cut = TextIds(tokenizer, max_tokens=4096), TextIds(tokenizer, max_tokens=20)
    assert cut.ids(PROMPT).tolist() == [
        *whole.ids(PROMPT)[:20].tolist(), tokenizer.end_id, tokenizer.vision_start_id,
    ]  # fmt: skip


def test_a_network_with_another_vocabulary_is_refused(released: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab_size is 100"):
        TextIds(ReleasedTokenizer(str(released)), max_tokens=4096, vocab_size=100).ids(PROMPT)


def test_words_digits_and_signs_have_ids_of_their_own() -> None:
    tokenizer = WordTokenizer.from_texts([PROMPT], vocab_size=256)
    names = {number: word for word, number in tokenizer.words.items()}
    said = [names[number] for number in tokenizer.encode('"Put 34 pens away"')]
    assert said == ['"', "Put", "3", "4", "pens", "away", '"']  # other numbers need no new words
    chat = [names[number] for number in tokenizer.chat("Put pens")]
    assert chat == [
        "<|im_start|>", "user", "\n", "Put", "pens", "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n",
    ]  # fmt: skip
    assert load_tokenizer(tokenizer.to_dict()).chat(PROMPT) == tokenizer.chat(PROMPT)


def test_known_words_keep_their_ids_and_too_many_are_refused() -> None:
    first = WordTokenizer.from_texts(["red cube"], vocab_size=256)
    second = WordTokenizer.from_texts(["blue cube"], vocab_size=256, known=first.words)
    assert {word: second.words[word] for word in first.words} == first.words
    assert second.words["blue"] not in first.words.values()
    with pytest.raises(ValueError, match=r"different words and signs, the model's vocab_size is 30"):
        WordTokenizer.from_texts(["red cube"], vocab_size=30)


def test_unknown_words_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = WordTokenizer.from_texts(["red cube"], vocab_size=256)
    assert tokenizer.encode("green cube") == [tokenizer.words["<unk>"], tokenizer.words["cube"]]
    tokenizer.encode("green cube")
    assert [record.message for record in caplog.records if "green" in record.message] == [
        "words outside the vocabulary become <unk>: ['green'] (text 'green cube')"
    ]


def test_prompts_lie_one_behind_the_other() -> None:
    text = TextIds(WordTokenizer.from_texts(["a b c"], vocab_size=256), max_tokens=10)
    ids, lengths = text.packed(["a", "", "b c"])
    assert lengths == (len(text.ids("a")), len(text.ids("")), len(text.ids("b c")))
    assert torch.equal(ids, torch.cat([text.ids("a"), text.ids(""), text.ids("b c")]))
