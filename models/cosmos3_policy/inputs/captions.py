"""From task texts to prompts: which paraphrase a sample gets, and whether it gets any, by (seed, position)."""

import functools
from collections.abc import Sequence

from torch import Tensor

from models.common import draws
from models.cosmos3_policy.inputs.prompt import PROMPTS, ClipFacts
from models.cosmos3_policy.inputs.settings import ProcessorConfig

_MOST_CACHED = 1 << 16


class Captions:
    """Prompts of samples."""

    def __init__(self, settings: ProcessorConfig, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._prompt = functools.lru_cache(_MOST_CACHED)(PROMPTS[settings.prompt])  # captions times steps stood still

    def prompts(
        self,
        texts: Sequence[str],
        positions: Tensor | Sequence[int],
        facts: ClipFacts,
        idle: Sequence[int] | None,
        *,
        random: bool,
    ) -> list[str]:
        """One prompt for each text.

        Args:
            positions: [N] on the host.
            idle: steps of each chunk in which the robot stands still; None leaves them out.
            random: draw paraphrases and drop captions, as in training; else the first one is taken and none dropped.
        """
        chosen = [self._paraphrases(text) for text in texts]
        which = [0.0] * len(texts)
        dropped = [False] * len(texts)
        if random and any(len(each) > 1 for each in chosen):
            which = draws.uniform(self._seed, "caption.paraphrase", positions).tolist()
        if random and self._settings.caption_dropout:
            dropped = (
                draws.uniform(self._seed, "caption.dropout", positions) < self._settings.caption_dropout
            ).tolist()
        return [
            "" if gone else self._prompt(each[int(share * len(each))], facts, None if idle is None else idle[i])
            for i, (each, share, gone) in enumerate(zip(chosen, which, dropped, strict=True))
        ]

    def _paraphrases(self, text: str) -> list[str]:
        """Those of a text that say something: drawn, a blank one would pass for a dropped caption."""
        separator = self._settings.caption_separator
        if not separator:
            return [text if text.strip() else ""]
        pieces = f" {text} ".split(separator)  # a separator at an end lacks its outer space
        pieces[0] = pieces[0][1:]
        pieces[-1] = pieces[-1][:-1]
        return [piece for piece in pieces if piece.strip()] or [""]

    def longest_first(self, texts: Sequence[str], facts: ClipFacts) -> list[str]:
        """The prompts that these texts can have, with the most digits, those of most bytes first."""
        steps = facts.num_steps if self._settings.idle_frames else None
        make = PROMPTS[self._settings.prompt]
        prompts = {make(each, facts, steps) for text in texts for each in self._paraphrases(text)}
        return sorted(prompts, key=lambda prompt: len(prompt.encode()), reverse=True)

    def vocabulary(self, texts: Sequence[str], facts: ClipFacts) -> list[str]:
        """Prompts that hold every word a prompt of these texts can have; numbers are spelled in digits."""
        return [self._prompt(each, facts, 0) for text in texts for each in self._paraphrases(text)]
