"""Batches of robot data to network inputs, and predicted actions back to robot units."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from models.common.batch import Batch
from models.cosmos3_policy.config import LATENT_STRIDE, Cosmos3PolicyConfig
from models.cosmos3_policy.inputs.actions import ActionLayout, Columns
from models.cosmos3_policy.inputs.captions import Captions
from models.cosmos3_policy.inputs.prompt import ClipFacts, framing
from models.cosmos3_policy.inputs.settings import VIEWS, ProcessorConfig
from models.cosmos3_policy.inputs.text import ReleasedTokenizer, TextIds, Tokenizer, WordTokenizer, load_tokenizer
from models.cosmos3_policy.vision.augment import Augmentations, draw_augmentations
from models.cosmos3_policy.vision.canvas import Canvas, choose_canvas, place
from models.cosmos3_policy.vision.compose import compose_videos, plan_canvas
from models.cosmos3_policy.vision.reference import compose_clip

__all__ = ["Cosmos3Processor", "ProcessorConfig"]

_TOKENS_AROUND = 64  # at most, of a chat's turn and of what closes it; templates have a dozen


class Cosmos3Processor:
    """Network inputs of one robot with a fixed set of cameras, state and action columns.

    `prepare` is the work on the CPU in the loader's threads: prompts, rows, draws. `to_network` is the picture work on
    the batch's device. Values that the network's host code reads travel as plain numbers, so that no step waits for a
    device to learn them.

    Args:
        cameras: of a batch, in the order wrist, left, right unless `settings.views` says otherwise.
        state, action: {column: values}, in the order they stand in the rows.
        image_size: (height, width) of a camera's frames; None learns it from the first batch, which is too late for
            `cost`.
        seed: of the draws.
    """

    def __init__(
        self,
        config: Cosmos3PolicyConfig,
        settings: ProcessorConfig,
        *,
        cameras: Sequence[str],
        state: Mapping[str, int],
        action: Mapping[str, int],
        tokenizer: Tokenizer,
        image_size: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        self.config, self.settings, self.seed = config, settings, int(seed)
        self.views = _views(settings, cameras)
        if settings.domain >= config.num_embodiment_domains:
            raise ValueError(
                f"processor does not fit the model: domain={settings.domain}, the network has "
                f"num_embodiment_domains={config.num_embodiment_domains}"
            )
        self.layout = ActionLayout(state, action, gripper=settings.gripper, width=config.action_dim)
        self.text = TextIds(tokenizer, max_tokens=settings.max_tokens, vocab_size=config.vocab_size)
        self.captions = Captions(settings, self.seed)
        self._size: tuple[int, int] | None = None
        if image_size is not None:
            self._size = int(image_size[0]), int(image_size[1])
            self.canvas()  # one that is not possible is told before the first batch

    @classmethod
    def for_dataset(
        cls,
        config: Cosmos3PolicyConfig,
        settings: ProcessorConfig,
        *,
        cameras: Sequence[str],
        state: Mapping[str, int],
        action: Mapping[str, int],
        texts: Sequence[str],
        checkpoint: str | None = None,
        image_size: Sequence[int] | None = None,
        known: Mapping[str, int] | None = None,
        seed: int = 0,
    ) -> Self:
        """The processor for training on a data set, with the tokenizer that the settings name.

        Args:
            texts: the data set's task texts, for a vocabulary of its words.
            checkpoint: folder or hub id of the weights, beside which the tokenizer lies.
            known: ids of the words that the weights were trained with, where they have such a vocabulary.

        Raises:
            ValueError: data, settings and network do not go together; FileNotFoundError: there is no tokenizer.
        """
        if settings.tokenizer == "words":
            facts = _facts(settings, choose_canvas("480", 640, 640), len(_views(settings, cameras)))
            vocabulary = Captions(settings, seed).vocabulary(texts, facts)
            tokenizer: Tokenizer = WordTokenizer.from_texts(vocabulary, vocab_size=config.vocab_size, known=known)
        elif (source := settings.tokenizer or checkpoint) is not None:
            tokenizer = ReleasedTokenizer(source)
        else:
            raise FileNotFoundError(
                "processor.tokenizer=null takes the tokenizer beside model.weights, and there are no weights; name a "
                "tokenizer's folder or hub id, or give words for a vocabulary of the data set's own words"
            )
        return cls(
            config,
            settings,
            cameras=cameras,
            state=state,
            action=action,
            tokenizer=tokenizer,
            image_size=image_size,
            seed=seed,
        )

    @property
    def cameras(self) -> list[str]:
        """Cameras of a batch: wrist, left, right."""
        return list(self.views.values())

    @property
    def state_keys(self) -> list[str]:
        """Columns of `batch.state` that are read."""
        return list(self.layout.state)

    @property
    def action_keys(self) -> list[str]:
        """Columns of `batch.action` that are read."""
        return list(self.layout.action)

    @property
    def horizon(self) -> int:
        """Action steps of a chunk."""
        return self.settings.horizon

    def windows(self) -> dict[str, range]:
        """Steps around the anchor, by camera and action column: frames t..t+H, commands t..t+H-1."""
        frames, chunk = range(self.settings.num_frames), range(self.horizon)
        return {**dict.fromkeys(self.cameras, frames), **dict.fromkeys(self.action_keys, chunk)}

    def canvas(self) -> Canvas:
        """Where the picture of all views lies.

        Raises:
            ValueError: the frames' size is not known yet, or no picture can be made of such frames.
        """
        size = self._size
        if size is None:
            raise ValueError("the size of the cameras' frames is not known yet; give the processor image_size")
        return plan_canvas(self.settings.tier, [size] * len(self.views))

    def facts(self) -> ClipFacts:
        """What prompts say of the clip."""
        return _facts(self.settings, self.canvas(), len(self.views))

    def prepare(self, batch: Batch, *, augment: bool = True) -> dict[str, Any]:
        """CPU work of a batch, or of an observation: one frame of each camera and no actions.

        With `augment` and actions, captions are dropped, paraphrases and the picture's random part drawn, as functions
        of (seed, position).

        Returns:
            text_ids int64 [S] of all prompts, text_lengths (host); action float32 [N, R, D]: the state's row, then the
            commands; position int64 [N]; augmentations: the picture's draws (host), or with `augment_on=cpu` video
            uint8 [N, 3, F, H, W].
        """
        self._learn_size(batch.images)
        random = augment and bool(batch.action)
        rows, prompts = self._described(batch, random=random)
        text_ids, text_lengths = self.text.packed(prompts)
        position = batch.position.to(torch.int64)
        out: dict[str, Any] = {
            "text_ids": text_ids,
            "text_lengths": text_lengths,
            "action": self.layout.padded(rows),
            "position": position,
        }
        if random and self.settings.augment is not None:
            out["augmentations"] = draw_augmentations(self.settings.augment, self.seed, position)
            if self.settings.augment_on == "cpu":
                out["video"] = self._reference(batch, out.pop("augmentations"))
        return out

    def to_network(self, batch: Batch, augment: bool) -> dict[str, Any]:
        """Inputs of a step on the batch's device: `batch.inputs` with the pictures of all views.

        Returns:
            video uint8 [N, 3, F, H, W] on its canvas, content_size (height, width) of the picture on it; text_ids,
            text_lengths, action, position as of `prepare`; domain, fps, and action_dim, the values of a row that are
            no padding.
        """
        inputs: dict[str, Any] = dict(batch.inputs)
        drawn: Augmentations | None = inputs.pop("augmentations", None)
        canvas = self.canvas()
        if "video" not in inputs or not augment:
            views = [batch.images[camera] for camera in self.cameras]
            inputs["video"] = compose_videos(views, canvas, drawn if augment else None, self.settings.augment)
        return {
            **inputs,
            "content_size": canvas.content,
            "domain": self.settings.domain,
            "fps": self.settings.fps,
            "action_dim": self.layout.action_dim,
        }

    def cost(self, batch: Batch) -> list[int]:
        """Tokens of each sample of a batch whose pictures need not be there: text, latent patches and action rows."""
        rows, prompts = self._described(batch, random=True)
        fixed = self.vision_tokens() + rows.shape[1]
        return [len(self.text.ids(prompt)) + fixed for prompt in prompts]

    def beyond(self, texts: Sequence[str], budget: int) -> tuple[int, str] | None:
        """(tokens, prompt) of a sample that a data set with these texts can have and `budget` tokens cannot hold."""
        fixed = self.vision_tokens() + self.settings.num_frames
        for prompt in self.captions.longest_first(texts, self.facts()):
            # No token is less than a byte, and few are around the prompt: the rest of them fit.
            if fixed + len(prompt.encode()) + _TOKENS_AROUND <= budget:
                return None
            if (tokens := fixed + len(self.text.ids(prompt))) > budget:
                return tokens, prompt
        return None

    def vision_tokens(self) -> int:
        """Latent patches of a clip."""
        patch = self.config.latent_patch_size
        rows, columns = self.canvas().cropped_latent_size
        frames = 1 + self.horizon // LATENT_STRIDE
        return frames * -(-rows // patch) * -(-columns // patch)

    def empty_prompts(self, count: int) -> tuple[Tensor, tuple[int, ...]]:
        """text_ids and text_lengths of `count` prompts without a caption: what guidance is measured against."""
        return self.text.packed([""] * count)

    def to_robot(self, rows: Tensor) -> dict[str, Any]:
        """Predicted command rows [N, H, D] -> {action column: float32 [N, H, d]} in the data set's units."""
        return self.layout.to_robot(rows)

    def _described(self, batch: Batch, *, random: bool) -> tuple[Any, list[str]]:
        state: Columns = batch.state
        if batch.action:
            rows = self.layout.rows(state, batch.action)
            if rows.shape[1] != self.settings.num_frames:
                raise ValueError(
                    f"the batch has {rows.shape[1] - 1} action steps, the processor's horizon is {self.horizon}"
                )
        else:
            rows = self.layout.state_row(state)
        idle = None
        if self.settings.idle_frames and batch.action:
            idle = self.layout.idle_steps(rows, self.settings.fps).tolist()
        return rows, self.captions.prompts(batch.text, batch.position, self.facts(), idle, random=random)

    def _reference(self, batch: Batch, drawn: Augmentations) -> Tensor:
        """The augmented video a frame at a time."""
        images = [batch.images[camera] for camera in self.cameras]
        views = [image if isinstance(image, Tensor) else image.rgb() for image in images]
        canvas = self.canvas()
        clips = [
            place(compose_clip([view[i] for view in views], each, self.settings.augment), canvas)
            for i, each in enumerate(drawn)
        ]
        return torch.stack(clips)

    def _learn_size(self, images: Mapping[str, Any]) -> None:
        """Check what a batch's pictures are like against what is known of them; sets the size where none is known."""
        for camera in self.cameras:
            if camera not in images:
                raise ValueError(f"the batch has cameras {sorted(images)}, the processor needs {self.cameras}")
            image = images[camera]
            planes = hasattr(image, "height")
            size = (image.height, image.width) if planes else tuple(image.shape[2:4])
            self._size = self._size or size
            if size != self._size:
                raise ValueError(
                    f"camera {camera}: frames are {size[0]}x{size[1]}, expected {self._size[0]}x{self._size[1]}; all "
                    "views of a picture need one size"
                )

    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `from_dict` makes an equal processor."""
        return {
            "config": self.config.to_dict(),
            "processor": self.settings.to_dict(),
            "cameras": self.cameras,
            "state": dict(self.layout.state),
            "action": dict(self.layout.action),
            "image_size": None if self._size is None else list(self._size),
            "tokenizer": self.text.tokenizer.to_dict(),
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> Self:
        """The processor that `to_dict` described.

        Args:
            tokenizer: the one described, where it is at hand.
        """
        values = dict(values)
        described = values.pop("tokenizer")
        return cls(
            Cosmos3PolicyConfig.from_dict(values.pop("config")),
            ProcessorConfig(**values.pop("processor")),
            tokenizer=tokenizer or load_tokenizer(described),
            **values,
        )


def _views(settings: ProcessorConfig, cameras: Sequence[str]) -> dict[str, str]:
    """Place of the picture to camera, in the order wrist, left, right."""
    if settings.views is not None:
        views = {place: settings.views[place] for place in VIEWS if place in settings.views}
        if missing := [camera for camera in views.values() if camera not in cameras]:
            raise ValueError(f"processor.views names cameras {missing}; data.cameras has {list(cameras)}")
        return views
    if len(cameras) not in (1, len(VIEWS)):
        raise ValueError(
            f"the picture is made of {', '.join(VIEWS)}, or of one camera; data.cameras has {len(cameras)}: "
            f"{list(cameras)}. Name those to use, or say in processor.views which goes where"
        )
    return dict(zip(VIEWS, cameras, strict=False))


def _facts(settings: ProcessorConfig, canvas: Canvas, num_views: int) -> ClipFacts:
    height, width = canvas.size
    return ClipFacts(
        num_frames=settings.num_frames,
        fps=settings.fps,
        height=height,
        width=width,
        aspect=canvas.aspect,
        num_steps=settings.num_frames,
        framing=settings.framing or framing(num_views),
    )
