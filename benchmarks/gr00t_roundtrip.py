"""An exported checkpoint in foreign hands: LeRobot's own policy loads it and acts as ours does.

    python benchmarks/gr00t_roundtrip.py --upstream-python PYTHON [--golden FILE]

A tiny checkpoint in the released layout is loaded, changed as training would, and exported in bfloat16. From there
`GR00TPolicy` loads it and, in the environment of `gr00t_upstream.py`, LeRobot's `GrootPolicy` with the processors it
makes of the folder's files. Both act on the same observations from the same noise, in float32. Prompt ids and patches
are ours on both sides: the released tokenizer is gated and not part of a checkpoint. Printed are the largest
differences of the normalised state, of the normalised chunk and of the actions in robot units.
"""

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from models.common.observation import Observation  # noqa: E402
from models.gr00t_n17.checkpoint.export import export  # noqa: E402
from models.gr00t_n17.checkpoint.folder import CheckpointFolder  # noqa: E402
from models.gr00t_n17.checkpoint.weights import load_weights  # noqa: E402
from models.gr00t_n17.inputs.processor import Processor  # noqa: E402
from models.gr00t_n17.inputs.text import WordTokenizer  # noqa: E402
from models.gr00t_n17.network import GR00TN17  # noqa: E402
from models.gr00t_n17.policy import GR00TPolicy  # noqa: E402

TAG = "new_embodiment"
TEXTS = ["Pick up the red block.", "Put it down, please!"]
CHECKPOINT = HERE.parent / "tests/models/gr00t_n17/conftest.py"  # writes the tiny checkpoint in the released layout


def words(folder: Path) -> WordTokenizer:
    return WordTokenizer.from_texts(TEXTS, backbone=CheckpointFolder(folder).config.backbone)


def exported(folder: Path) -> Path:
    """A base checkpoint, one slot and the DiT changed as by training, exported with the base around it."""
    spec = importlib.util.spec_from_file_location("checkpoint_layout", CHECKPOINT)
    assert spec is not None
    assert spec.loader is not None
    layout = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layout)
    # More decoder layers than DeepStack stages, as released: at the last layer readers add a stage or do not.
    base = layout._write(folder / "base", config={"select_layer": 3})
    opened = CheckpointFolder(base)
    with torch.device("meta"):
        network = GR00TN17(opened.config, slots=(opened.embodiment_ids[TAG],))
    load_weights(network, base)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith("action_head.") and parameter.ndim > 1:
                parameter.mul_(1.7)
    processor = Processor.from_checkpoint(opened, embodiment=TAG, tokenizer=words(base))
    export(network, processor, folder / "out", base=opened, shard_bytes=1e6)
    return folder / "out"


def observation() -> dict[str, Any]:
    """Two moments of one robot by the names of the checkpoint's modality config; integer arithmetic only."""
    y, x = np.mgrid[:240, :320]

    def frame(shift: int) -> np.ndarray:
        channels = [(3 * x + y + 40 * shift) % 256, (x * y // 7 + shift) % 256, (x // 9 + y + shift) % 256]
        return np.stack(channels, axis=-1).astype(np.uint8)

    frames = {name: np.stack([[frame(camera)], [frame(camera + 2)]]) for camera, name in enumerate(("front", "wrist"))}
    state = np.linspace(-1.1, 1.2, 12, dtype=np.float32).reshape(2, 1, 6)
    return {
        "video": frames,
        "state": {"single_arm": state[..., :5], "gripper": state[..., 5:]},
        "language": {"annotation.human.action.task_description": [[text] for text in TEXTS]},
    }


def act(folder: Path) -> dict[str, Tensor]:
    """Our policy on an exported folder: what the network was given, its chunk, and the actions in robot units."""
    policy = GR00TPolicy.from_pretrained(folder, embodiment=TAG, tokenizer=words(folder))
    config, processor = policy.policy.network.config, policy.policy.processor
    generator = np.random.Generator(np.random.Philox(key=7))
    shape = (len(TEXTS), config.action_horizon, config.max_action_dim)
    noise = torch.from_numpy(generator.standard_normal(shape).astype(np.float32))
    seen = observation()
    actions, _ = policy.get_action(seen, {"noise": noise})
    images = {name: torch.from_numpy(frames) for name, frames in seen["video"].items()}
    state = {name: torch.from_numpy(values) for name, values in seen["state"].items()}
    moment = Observation(images=images, state=state, text=TEXTS, position=torch.zeros(2, dtype=torch.int64))
    prepared = processor.prepare(moment)
    inputs = processor.to_network(
        Observation(**{**vars(moment), "inputs": prepared}),
        augment=False,
    )
    names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw", "state")
    return {
        **{name: inputs[name] for name in names},
        "noise": noise,
        "raw_state": torch.cat([state["single_arm"], state["gripper"]], dim=-1)[:, 0],
        "chunk": policy.policy.predict(images, state, TEXTS, noise=noise),
        "actions": torch.from_numpy(np.concatenate([actions["single_arm"], actions["gripper"]], axis=-1)),
    }


def layout_digest(folder: Path) -> str:
    """SHA-256 over config, statistics, embodiments, and names, dtypes and shapes of the tensors."""
    digest = hashlib.sha256()
    for name in ("config.json", "statistics.json", "embodiment_id.json"):
        digest.update(json.dumps(json.loads((folder / name).read_text()), sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(load_file(file).items()):
            digest.update(f"{file.name}\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
    return digest.hexdigest()


def worst(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value where that is above 1."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float((ours.double() - theirs.double()).abs().max() / theirs.abs().max().clamp(min=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream-python", required=True, help="Python of an environment with LeRobot's groot extra")
    parser.add_argument("--golden", type=Path, help="write LeRobot's answer to this file, for the test")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        out = exported(folder)
        ours = act(out)
        save_file({k: v.contiguous() for k, v in ours.items()}, str(folder / "ours.safetensors"))
        command = [arguments.upstream_python, str(HERE / "gr00t_upstream.py"), "act", str(folder)]
        subprocess.run(command, check=True)
        theirs = load_file(folder / "theirs.safetensors")
        digest = layout_digest(out)
    for name in ("state", "chunk", "actions"):
        print(f"{name:<8} {tuple(theirs[name].shape)!s:<14} largest difference {worst(ours[name], theirs[name]):.1e}")
    if arguments.golden:
        save_file(theirs, str(arguments.golden), metadata={"layout_sha256": digest})


if __name__ == "__main__":
    main()
