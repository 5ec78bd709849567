"""Instructions to prompt token ids: clean-up, the chat form of the backbone, word-level and released tokenizers."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from models.gr00t_n17.config import BackboneConfig

logger = logging.getLogger(__name__)

_NOT_WORD_OR_SPACE = re.compile(r"[^\w\s]")


def formalize(text: str) -> str:
    """Lower-case, then delete what is neither a word character nor white space ("Don't" -> "dont", "_" stays)."""
    return _NOT_WORD_OR_SPACE.sub("", text.lower())


class Tokenizer(Protocol):
    """Text without special tokens to ids. Special ids come from the network's configuration."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no special tokens added."""

    def to_dict(self) -> dict[str, Any]:
        """JSON description from which `load_tokenizer` makes the tokenizer again."""


class WordTokenizer:
    """Closed word-level vocabulary for models that have no released tokenizer.

    The ids that are not special are given out in order: unknown word, the role word and the line break of the chat
    form, then the sorted words.
    """

    UNKNOWN = "<unk>"

    def __init__(self, words: Mapping[str, int]) -> None:
        self.words = dict(words)
        self._warned: set[str] = set()

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], *, backbone: BackboneConfig, formalize_language: bool = True
    ) -> "WordTokenizer":
        """Vocabulary of `texts` (a dataset's tasks). Raises ValueError where they have too many different words."""
        cleaned = (formalize(text) if formalize_language else text for text in texts)
        found = sorted({word for text in cleaned for word in _split(text)} - {"user", "\n"})
        taken = set(special_ids(backbone).values())
        size = backbone.text.vocab_size
        free = [i for i in range(size) if i not in taken]
        entries = [cls.UNKNOWN, "user", "\n", *found]
        if len(entries) > len(free):
            raise ValueError(
                f"the task texts have {len(found)} different words, the model has room for {max(0, len(free) - 3)}: "
                f"backbone.text.vocab_size={size} must be at least {len(entries) + len(taken)}"
            )
        return cls(dict(zip(entries, free, strict=False)))

    def encode(self, text: str) -> list[int]:
        unknown = [word for word in _split(text) if word not in self.words and word not in self._warned]
        if unknown:
            self._warned.update(unknown)
            logger.warning("words outside the vocabulary become %s: %s (text %r)", self.UNKNOWN, unknown, text)
        return [self.words.get(word, self.words[self.UNKNOWN]) for word in _split(text)]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "words", "words": dict(self.words)}


class ReleasedTokenizer:
    """The tokenizer published with the backbone, through transformers (hub id or folder)."""

    def __init__(self, source: str) -> None:
        try:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            where = "folder" if Path(source).is_dir() else "hub repository"
            raise FileNotFoundError(
                f"no tokenizer could be read from the {where} {source!r}: tokenizer.json and tokenizer_config.json are "
                "needed. A GR00T N1.7 checkpoint does not hold them; they come from the backbone's repository "
                "(nvidia/Cosmos-Reason2-2B, access on request, or the equal files of Qwen/Qwen3-VL-2B-Instruct). Put "
                "them into a folder and name it in processor.tokenizer, or use processor.tokenizer=words for a model "
                f"that is trained from scratch ({error})"
            ) from error
        self.source = source

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "released", "source": self.source}


def load_tokenizer(values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` described."""
    if values.get("kind") == "words":
        return WordTokenizer(values["words"])
    if values.get("kind") == "released":
        return ReleasedTokenizer(values["source"])
    raise ValueError(f"tokenizer kind {values.get('kind')!r} is none of 'words', 'released'")


def special_ids(backbone: BackboneConfig) -> dict[str, int]:
    """Ids the network gives a meaning of its own."""
    return {name: value for name, value in vars(backbone).items() if name.endswith("_token_id")}


class PromptBuilder:
    """One user turn, images first: im_start user NL, per image vision_start image_pad... vision_end, text, im_end NL.

    The pieces between special tokens are encoded one by one: a special token splits the text for every tokenizer here,
    so this gives the ids of the rendered string. Ids are cached per (text, image token counts): tasks are few.
    """

    def __init__(self, tokenizer: Tokenizer, backbone: BackboneConfig, *, formalize_language: bool) -> None:
        self.tokenizer = tokenizer
        self.backbone = backbone
        self.formalize_language = formalize_language
        self._cache: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def ids(self, text: str, image_tokens: Sequence[int]) -> Tensor:
        """int64 [S] of one prompt; `image_tokens` holds the token count of each image in order."""
        key = (text, tuple(image_tokens))
        if key not in self._cache:
            if len(self._cache) >= 100_000:  # free-form texts must not grow the memory of a long run
                self._cache.clear()
            b = self.backbone
            ids = [b.im_start_token_id, *self.tokenizer.encode("user\n")]
            for count in image_tokens:
                ids += [b.vision_start_token_id, *[b.image_token_id] * count, b.vision_end_token_id]
            ids += self.tokenizer.encode(formalize(text) if self.formalize_language else text)
            ids += [b.im_end_token_id, *self.tokenizer.encode("\n")]
            self._cache[key] = torch.tensor(ids, dtype=torch.int64)
        return self._cache[key]

    def batch(
        self, texts: Sequence[str], image_tokens: Sequence[int], *, length: int | None = None, multiple: int = 1
    ) -> tuple[Tensor, Tensor]:
        """input_ids and attention_mask, int64 [B, S], padded on the left to the longest prompt or to `length`.

        With `multiple` the longest prompt is rounded up to it: few shapes, so that a compiled network is kept.
        """
        return self.padded([self.ids(text, image_tokens) for text in texts], texts, length=length, multiple=multiple)

    def padded(
        self, rows: Sequence[Tensor], texts: Sequence[str], *, length: int | None = None, multiple: int = 1
    ) -> tuple[Tensor, Tensor]:
        """`batch` of the ids of each prompt; the texts are for the message of one that does not fit."""
        longest = max(len(row) for row in rows)
        if length is not None and longest > length:
            text = texts[[len(row) for row in rows].index(longest)]
            raise ValueError(
                f"a prompt of {longest} tokens does not fit into processor.prompt_length={length} (text {text!r}); "
                "raise it, or set it to null for the longest prompt of each batch"
            )
        size = length or -(-longest // multiple) * multiple
        input_ids = torch.full((len(rows), size), self.backbone.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros((len(rows), size), dtype=torch.int64)
        for i, row in enumerate(rows):
            input_ids[i, size - len(row) :] = row
            attention_mask[i, size - len(row) :] = 1
        return input_ids, attention_mask


def _split(text: str) -> list[str]:
    """Words, and line breaks as words of their own."""
    return re.findall(r"\n|\S+", text)
