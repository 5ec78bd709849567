"""Prompts to token ids: one user turn in the chat form, then the two tokens that open the clip."""

import json
import logging
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_PIECE = re.compile(r"\n|[^\W\d_]+|\S")
_MOST_CACHED = 200_000  # prompts: free-form texts must not grow the memory of a long run


class Tokenizer(Protocol):
    """Text to ids. `end_id` closes a prompt, `vision_start_id` opens the clip behind it."""

    @property
    def end_id(self) -> int: ...

    @property
    def vision_start_id(self) -> int: ...

    def chat(self, prompt: str) -> list[int]:
        """Ids of a conversation of one user turn, up to where the answer would begin."""

    def to_dict(self) -> dict[str, Any]:
        """JSON description from which `load_tokenizer` makes the tokenizer again."""


class WordTokenizer:
    """Closed vocabulary of words, single digits and signs, for models that have no released tokenizer."""

    UNKNOWN, START, END, VISION = "<unk>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"
    _ALWAYS = (UNKNOWN, START, END, VISION, "user", "assistant", "\n", *"0123456789", *'{}[]":,.!?-_|()')

    def __init__(self, words: Mapping[str, int]) -> None:
        self.words = dict(words)
        if missing := [word for word in self._ALWAYS[:7] if word not in self.words]:
            raise ValueError(f"the vocabulary lacks {missing}; make it with WordTokenizer.from_texts")
        self.end_id, self.vision_start_id = self.words[self.END], self.words[self.VISION]
        self._warned: set[str] = set()

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], *, vocab_size: int, known: Mapping[str, int] | None = None
    ) -> "WordTokenizer":
        """Vocabulary of `texts`: whole prompts, or the task texts with one prompt around any of them.

        Args:
            known: ids of the vocabulary that the weights were trained with; these words keep theirs.

        Raises:
            ValueError: more words than `vocab_size`.
        """
        ids = dict(known or {})
        found = sorted({piece for text in texts for piece in _PIECE.findall(text)})
        new = [word for word in dict.fromkeys([*cls._ALWAYS, *found]) if word not in ids]
        taken = set(ids.values())
        free = [i for i in range(vocab_size) if i not in taken]
        if len(new) > len(free):
            raise ValueError(
                f"the prompts have {len(ids) + len(new)} different words and signs, the model's vocab_size is "
                f"{vocab_size}; give it at least as many, or a released tokenizer in processor.tokenizer"
            )
        return cls({**ids, **dict(zip(new, free, strict=False))})

    def encode(self, text: str) -> list[int]:
        """Ids of the pieces of a text; white space other than line breaks is not kept."""
        pieces = _PIECE.findall(text)
        if unknown := sorted({piece for piece in pieces if piece not in self.words} - self._warned):
            self._warned.update(unknown)
            logger.warning("words outside the vocabulary become %s: %s (text %r)", self.UNKNOWN, unknown, text)
        return [self.words.get(piece, self.words[self.UNKNOWN]) for piece in pieces]

    def chat(self, prompt: str) -> list[int]:
        start, end, line = self.words[self.START], self.words[self.END], self.words["\n"]
        user, assistant = self.words["user"], self.words["assistant"]
        return [start, user, line, *self.encode(prompt), end, line, start, assistant, line]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "words", "words": dict(self.words)}


class ReleasedTokenizer:
    """A published tokenizer, through transformers: a folder or hub repository, in Diffusers' layout or a plain one."""

    def __init__(self, source: str) -> None:
        folder = _tokenizer_folder(Path(source))
        try:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder is not None else source)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"no tokenizer could be read from {source!r}: tokenizer.json and tokenizer_config.json are needed, in "
                "the folder itself or in its tokenizer/. Name a folder or hub repository that has them in "
                f"processor.tokenizer, or give processor.tokenizer=words for a model that is trained from scratch "
                f"({error})"
            ) from error
        self.source = source
        self._lock = threading.Lock()  # the fast tokenizers refuse to be used by two threads while they are set up
        self.end_id = self._special("<|im_end|>", self._tokenizer.eos_token_id)
        self.vision_start_id = self._special("<|vision_start|>", None)
        self._template = self._tokenizer.chat_template or _processor_template(folder or Path(source))

    def chat(self, prompt: str) -> list[int]:
        with self._lock:
            return list(self._tokenizer.encode(self._rendered(prompt), add_special_tokens=False))

    def _rendered(self, prompt: str) -> str:
        if self._template is None:  # what the template of these tokenizers gives
            return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        turns = [{"role": "user", "content": prompt}]
        rendered = self._tokenizer.apply_chat_template(
            turns, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        return str(rendered)

    def _special(self, token: str, fallback: int | None) -> int:
        found = self._tokenizer.convert_tokens_to_ids(token)
        if found is not None and found != self._tokenizer.unk_token_id:
            return int(found)
        if fallback is None:
            raise ValueError(
                f"the tokenizer {self.source!r} has no token {token}; name that of the checkpoint's language model in "
                "processor.tokenizer"
            )
        return int(fallback)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "released", "source": self.source}


def _tokenizer_folder(folder: Path) -> Path | None:
    """Where a folder keeps its tokenizer; None for what is no folder."""
    if not folder.is_dir():
        return None
    for place in (folder, folder / "tokenizer", folder / "text_tokenizer"):
        if (place / "tokenizer.json").is_file() or (place / "tokenizer_config.json").is_file():
            return place
    return folder


def _processor_template(folder: Path) -> str | None:
    """The chat template where a folder keeps it beside the tokenizer instead of in it."""
    jinja, path = folder / "chat_template.jinja", folder / "chat_template.json"
    if jinja.is_file():
        return jinja.read_text()
    return str(json.loads(path.read_text())["chat_template"]) if path.is_file() else None


def load_tokenizer(values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` described."""
    if values.get("kind") == "words":
        return WordTokenizer(values["words"])
    if values.get("kind") == "released":
        return ReleasedTokenizer(values["source"])
    raise ValueError(f"tokenizer kind {values.get('kind')!r} is none of 'words', 'released'")


class TextIds:
    """Prompts to ids on one axis, cached: a data set's prompts repeat.

    Args:
        max_tokens: longest chat; what is beyond is cut off, the two closing tokens excepted.
        vocab_size: of the network; None does not check it.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_tokens: int, vocab_size: int | None = None) -> None:
        self.tokenizer, self._max_tokens, self._vocab_size = tokenizer, max_tokens, vocab_size
        self._cache: dict[str, Tensor] = {}

    def ids(self, prompt: str) -> Tensor:
        """int64 [S] of one prompt: the chat, the end token, the token that opens the clip."""
        found = self._cache.get(prompt)
        if found is None:
            tokenizer = self.tokenizer
            chat = tokenizer.chat(prompt)[: self._max_tokens]
            found = torch.tensor([*chat, tokenizer.end_id, tokenizer.vision_start_id], dtype=torch.int64)
            if self._vocab_size is not None and int(found.max()) >= self._vocab_size:
                raise ValueError(
                    f"the tokenizer gives id {int(found.max())}, the network's vocab_size is {self._vocab_size}; name "
                    "the checkpoint's own tokenizer in processor.tokenizer"
                )
            if len(self._cache) >= _MOST_CACHED:
                self._cache.clear()
            self._cache[prompt] = found
        return found

    def packed(self, prompts: Sequence[str]) -> tuple[Tensor, tuple[int, ...]]:
        """int64 [sum S] of all prompts one after another, and the length of each."""
        rows = [self.ids(prompt) for prompt in prompts]
        return torch.cat(rows), tuple(map(len, rows))
