"""What a sample tells the language tower: the JSON description of the clip, or the same in sentences.

The words are not ours to choose: the released weights were trained on them, and a policy asked in other words answers
worse. They are constants of the format, kept together here and held fast by a test.
"""

import json
from dataclasses import dataclass
from typing import Any

_CONCAT_VIEW = "This video contains concatenated views from multiple camera perspectives."
_WRIST_VIEW = "This video is captured from a wrist-mounted camera."
_PLACES = (
    "The top row is from the wrist-mounted camera. The bottom row contains two horizontally concatenated third-person "
    "perspective views of the scene from opposite sides, with the robot visible."
)


@dataclass(frozen=True, kw_only=True)
class ClipFacts:
    """What prompts say beside the task.

    num_frames, fps: of the clip. height, width: of the canvas, padding included. aspect: name of its shape, such as
    "4,3". num_steps: rows of the action chunk, the state's included. framing: sentences on the cameras.
    """

    num_frames: int
    fps: float
    height: int
    width: int
    aspect: str
    num_steps: int
    framing: str

    @property
    def seconds(self) -> float:
        """Length of the clip."""
        return self.num_frames / self.fps


def framing(num_views: int) -> str:
    """What is said of the cameras: of a wrist camera above two of the scene, or of a wrist camera alone."""
    return _WRIST_VIEW if num_views == 1 else f"{_CONCAT_VIEW} {_PLACES}"


def json_prompt(caption: str, facts: ClipFacts, idle: int | None) -> str:
    """One line of JSON; empty for an empty caption.

    idle: steps of the chunk in which the robot stands still; None leaves them out, as at serving.
    """
    if not caption:
        return ""
    minutes, seconds = divmod(round(facts.seconds), 60)
    action = {"time": f"0:00-{minutes}:{seconds:02d}", "description": _sentence(caption)}
    if idle is not None:
        action["idle_frame"] = f"{idle} out of {facts.num_steps}."
    prompt: dict[str, Any] = {
        "cinematography": {"framing": facts.framing},
        "actions": [action],
        "duration": f"{int(facts.seconds)}s",
        "fps": float(facts.fps),
        "resolution": {"H": facts.height, "W": facts.width},
        "aspect_ratio": facts.aspect,
    }
    return json.dumps(prompt)


def plain_prompt(caption: str, facts: ClipFacts, idle: int | None) -> str:
    """The same in sentences; empty for an empty caption."""
    if not caption:
        return ""
    sentences = [
        facts.framing,
        f"The video is {int(facts.seconds):.1f} seconds long and is of {facts.fps:.0f} FPS.",
        f"This video is of {facts.height}x{facts.width} resolution.",
    ]
    if idle is not None:
        sentences.append(f"IdleFrames: {idle} out of {facts.num_steps}.")
    caption = caption.rstrip()
    return " ".join([caption if caption.endswith(".") else f"{caption}.", *sentences])


PROMPTS = {"json": json_prompt, "plain": plain_prompt}


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."
