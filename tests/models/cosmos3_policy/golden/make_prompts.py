"""Writes prompts.json: prompts and idle counts as the public framework makes them.

    git clone https://github.com/NVIDIA/cosmos-framework && git -C cosmos-framework checkout 5eee9ed
    python -m venv oracle && oracle/bin/pip install torch numpy scipy
    oracle/bin/python make_prompts.py cosmos-framework

Only its formatters and its idle count are run; its logger, which wants a whole installation, is replaced by nothing.
"""

import itertools
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch

CAPTIONS = ("Put the marker in the pot", "Is it open?", "  wipe the table.  ", 'say "hi" – ünïcode')
PLACES = (
    "The top row is from the wrist-mounted camera. The bottom row contains two horizontally concatenated third-person "
    "perspective views of the scene from opposite sides, with the robot visible."
)
CLIPS = ((33, 15.0, 544, 736), (33, 10.0, 256, 320), (17, 30.0, 480, 832), (9, 10.0, 640, 640))


def stub(name: str, **values: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module


def sample(caption: str, views: str, clip: tuple[int, float, int, int], idle: int | None) -> dict:
    frames, fps, height, width = clip
    values = {
        "ai_caption": caption,
        "viewpoint": views,
        "video": torch.empty(3, frames, 1, 1),
        "conditioning_fps": torch.tensor(fps),
        "image_size": torch.tensor([height, width, 1, 1], dtype=torch.float),
        "action": torch.empty(frames, 8),
        "mode": "wam",
    }
    if views == "concat_view":
        values["additional_view_description"] = PLACES
    return values | ({} if idle is None else {"idle_frames": torch.tensor(idle)})


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    quiet = types.SimpleNamespace(warning=print, info=print, debug=print)
    stub("cosmos_framework.utils", log=quiet)
    from cosmos_framework.data.generator.action.utils.action_spec import Gripper, Joint, build_action_spec
    from cosmos_framework.data.generator.action.utils.json_formatter import ActionPromptJsonFormatter
    from cosmos_framework.data.generator.action.utils.pose_utils import compute_idle_frames
    from cosmos_framework.data.generator.action.utils.viewpoint_utils import ViewpointTextInfo
    from cosmos_framework.data.generator.augmentors.duration_fps_text_timestamps import DurationFPSTextTimeStamps
    from cosmos_framework.data.generator.augmentors.idle_frames_text_info import IdleFramesTextInfo
    from cosmos_framework.data.generator.augmentors.resolution_text_info import ResolutionTextInfo

    cases = []
    for caption, views, clip, idle in itertools.product(CAPTIONS, ("concat_view", "wrist_view"), CLIPS, (None, 4)):
        structured = ActionPromptJsonFormatter()(sample(caption, views, clip, idle))["ai_caption"]
        plain = sample(caption, views, clip, idle)
        for step in (
            ViewpointTextInfo(args={}),
            DurationFPSTextTimeStamps(args={}),
            ResolutionTextInfo(args={}),
            IdleFramesTextInfo(args={"dropout_rate": 0.0}),
        ):
            plain = step(plain)
        facts = dict(zip(("frames", "fps", "height", "width"), clip, strict=True))
        said = {"json": json.dumps(structured), "plain": plain["ai_caption"]}
        cases.append({"caption": caption, "views": 3 if views == "concat_view" else 1, **facts, "idle": idle, **said})
    rng = np.random.default_rng(0)
    idle_cases = []
    spec = build_action_spec(Joint(n=7, label="joint"), Gripper())
    for fps in (15.0, 10.0):
        for _ in range(12):
            steps = rng.uniform(0, 1.6 * 5e-3 / fps, (33, 8)) * (rng.random((33, 1)) < rng.uniform(0.05, 0.6))
            steps[:, 7] = rng.choice([0.0, 0.004, 0.02], 33, p=[0.8, 0.15, 0.05])
            action = np.round(np.cumsum(steps, axis=0), 6).astype(np.float32)
            count = compute_idle_frames(
                action, spec, eps_t=0, eps_r=0, eps_g=1e-2, joint_threshold=5e-3 / fps, min_streak=3
            )
            idle_cases.append(
                {"fps": fps, "action": [[round(float(v), 6) for v in row] for row in action], "idle": count}
            )
    text = json.dumps({"prompts": cases, "idle": idle_cases}, separators=(",", ":"))
    Path(__file__).with_name("prompts.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
