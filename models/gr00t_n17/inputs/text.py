"""Instructions to prompt token ids: clean-up, the chat form of the backbone, word-level and released tokenizers."""

import json
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
        cls,
        texts: Iterable[str],
        *,
        backbone: BackboneConfig,
        formalize_language: bool = True,
        known: Mapping[str, int] | None = None,
    ) -> "WordTokenizer":
        """Vocabulary of `texts` (a dataset's tasks). Raises ValueError where they have too many different words.

        known: ids of the vocabulary that the weights were trained with; these words keep theirs.
        """
        cleaned = (formalize(text) if formalize_language else text for text in texts)
        known = dict(known or {})
        found = sorted({word for text in cleaned for word in _split(text)} - {"user", "\n", *known})
        taken = {*special_ids(backbone).values(), *known.values()}
        size = backbone.text.vocab_size
        free = [i for i in range(size) if i not in taken]
        entries = [*(word for word in (cls.UNKNOWN, "user", "\n") if word not in known), *found]
        if len(entries) > len(free):
            room = max(0, len(free) - (len(entries) - len(found)))
            raise ValueError(
                f"the task texts have {len(found)} different words, the model has room for {room}: "
                f"backbone.text.vocab_size={size} must be at least {len(entries) + len(taken)}"
            )
        return cls({**known, **dict(zip(entries, free, strict=False))})

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
        self.chat_template: str | None = self._tokenizer.chat_template or _processor_template(Path(source))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def token(self, token_id: int) -> str | None:
        """The token of an id, None where there is none."""
        return self._tokenizer.convert_ids_to_tokens(token_id) if token_id < len(self._tokenizer) else None

    def render(self, text: str, num_images: int) -> str:
        """One user turn, images first, in the tokenizer's own chat template, no generation prompt."""
        content = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
        return str(
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": content}],
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=False,
            )
        )

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "released", "source": self.source}


def _processor_template(folder: Path) -> str | None:
    """The chat template where a folder keeps it for the processor instead of for the tokenizer."""
    path = folder / "chat_template.json"
    return json.loads(path.read_text())["chat_template"] if path.is_file() else None


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
    """One user turn, images first, rendered by the chat template of a released tokenizer.

    Without one: im_start user NL, per image vision_start image_pad... vision_end, text, im_end NL, which is what that
    template gives. Special tokens split a text, so pieces between them are encoded one by one, with the ids of the
    rendered string. Ids are cached per (text, image token counts): tasks are few.

    Raises:
        ValueError: tokenizer and network give other ids to the same special token.
    """

    def __init__(self, tokenizer: Tokenizer, backbone: BackboneConfig, *, formalize_language: bool) -> None:
        self.tokenizer = tokenizer
        self.backbone = backbone
        self.formalize_language = formalize_language
        self._cache: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        if isinstance(tokenizer, ReleasedTokenizer):
            _check_special(tokenizer, backbone)

    def ids(self, text: str, image_tokens: Sequence[int]) -> Tensor:
        """int64 [S] of one prompt; `image_tokens` holds the token count of each image in order."""
        key = (text, tuple(image_tokens))
        if key not in self._cache:
            if len(self._cache) >= 100_000:  # free-form texts must not grow the memory of a long run
                self._cache.clear()
            cleaned = formalize(text) if self.formalize_language else text
            templated = isinstance(self.tokenizer, ReleasedTokenizer) and self.tokenizer.chat_template is not None
            ids = self._templated(cleaned, image_tokens) if templated else self._plain(cleaned, image_tokens)
            self._cache[key] = torch.tensor(ids, dtype=torch.int64)
        return self._cache[key]

    def _plain(self, text: str, image_tokens: Sequence[int]) -> list[int]:
        b, encode = self.backbone, self.tokenizer.encode
        ids = [b.im_start_token_id, *encode("user\n")]
        for count in image_tokens:
            ids += [b.vision_start_token_id, *[b.image_token_id] * count, b.vision_end_token_id]
        return [*ids, *encode(text), b.im_end_token_id, *encode("\n")]

    def _templated(self, text: str, image_tokens: Sequence[int]) -> list[int]:
        assert isinstance(self.tokenizer, ReleasedTokenizer)
        image = self.tokenizer.token(self.backbone.image_token_id)
        assert image is not None
        first, *others = self.tokenizer.render(text, len(image_tokens)).split(image)
        if len(others) != len(image_tokens):
            raise ValueError(
                f"the chat template of {self.tokenizer.source!r} gives {len(others)} image tokens {image} for "
                f"{len(image_tokens)} images; name a tokenizer of the backbone in processor.tokenizer"
            )
        ids = self.tokenizer.encode(first)
        for count, piece in zip(image_tokens, others, strict=True):
            ids += [self.backbone.image_token_id] * count + self.tokenizer.encode(piece)
        return ids

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


def _check_special(tokenizer: ReleasedTokenizer, backbone: BackboneConfig) -> None:
    """A tokenizer of another model would train without a word said: images would be no images to the network."""
    expected = {
        "im_start_token_id": "<|im_start|>",
        "im_end_token_id": "<|im_end|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "image_token_id": "<|image_pad|>",
    }
    wrong = {name: tokenizer.token(getattr(backbone, name)) for name in expected}
    wrong = {name: token for name, token in wrong.items() if token != expected[name]}
    if wrong:
        found = ", ".join(f"{name}={getattr(backbone, name)} is {token!r}" for name, token in wrong.items())
        raise ValueError(
            f"the tokenizer {tokenizer.source!r} does not fit the backbone: {found}; expected are "
            f"{[expected[name] for name in wrong]}. Name the backbone's own tokenizer in processor.tokenizer"
        )


def _split(text: str) -> list[str]:
    """Words, and line breaks as words of their own."""
    return re.findall(r"\n|\S+", text)
