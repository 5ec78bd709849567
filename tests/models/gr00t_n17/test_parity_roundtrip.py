"""An exported checkpoint acts as it does in LeRobot's policy, whose answer is a golden value.

It was written by `python benchmarks/gr00t_roundtrip.py --upstream-python PYTHON --golden
tests/models/gr00t_n17/golden/parity_roundtrip.safetensors`, which loads the exported folder with LeRobot's own loader.
"""

import importlib.util
from pathlib import Path

from safetensors import safe_open

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/models/gr00t_n17/golden/parity_roundtrip.safetensors"


def test_an_exported_checkpoint_acts_as_in_lerobot(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gr00t_roundtrip", ROOT / "benchmarks/gr00t_roundtrip.py")
    assert spec is not None
    assert spec.loader is not None
    roundtrip = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(roundtrip)
    out = roundtrip.exported(tmp_path)
    ours = roundtrip.act(out)
    with safe_open(GOLDEN, framework="pt") as golden:
        # LeRobot has read exactly these files; after a change of the layout it has to read them again.
        assert roundtrip.layout_digest(out) == golden.metadata()["layout_sha256"], "make the golden file again"
        for name in ("state", "chunk", "actions"):
            assert roundtrip.worst(ours[name], golden.get_tensor(name)) < 1e-5, name
