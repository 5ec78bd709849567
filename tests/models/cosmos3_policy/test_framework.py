"""Checkpoints of NVIDIA's framework: what its ranks wrote is read, and what is written is a folder of its own."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from models.common.dcp_tensors import DcpTensors, uncovered
from models.common.digest import weights_digest
from models.cosmos3_policy.checkpoint.folder import CheckpointFolder
from models.cosmos3_policy.checkpoint.framework import write_framework
from models.cosmos3_policy.checkpoint.names import is_action_head, to_framework
from models.cosmos3_policy.checkpoint.weights import load_weights
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.network import Cosmos3Policy

ROOT = Path(__file__).resolve().parents[3]
CONFIG = Cosmos3PolicyConfig.tiny(vocab_size=64)
EMBED = "net.language_model.model.embed_tokens.weight"


def build(seed: int | None = None) -> Cosmos3Policy:
    with torch.device("meta"):
        network = Cosmos3Policy(CONFIG)
    if seed is not None:
        network.to_empty(device="cpu")
        network.init_weights(seed)
    return network


def digest(network: Cosmos3Policy) -> str:
    return weights_digest(network.state_dict())


def averages_of(network: Cosmos3Policy) -> dict[str, Tensor]:
    return {name: p.detach() + 1.0 for name, p in network.named_parameters() if p.requires_grad}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    source = build(1)
    write_framework(source.state_dict(), tmp_path / "run", step=10_000, averages=averages_of(source))
    return tmp_path / "run"


@pytest.mark.parametrize("inside", [".", "iter_000010000", "iter_000010000/model"])
def test_weights_go_out_and_come_back_bit_for_bit(written: Path, inside: str) -> None:
    assert (written / "latest_checkpoint.txt").read_text().strip() == "iter_000010000"
    assert CheckpointFolder(written / inside).is_distributed
    network = build()
    load_weights(network, written / inside, keep_action_heads=True)
    assert digest(network) == digest(build(1))


def test_averages_are_read_on_request_alone(written: Path) -> None:
    network, source = build(), build(1)
    load_weights(network, written, keep_action_heads=True, averaged=True)
    averages = averages_of(source)
    for name, value in network.state_dict().items():
        assert torch.equal(value, averages.get(name, source.state_dict()[name])), name


def test_a_warm_start_from_the_framework_takes_fresh_heads(written: Path) -> None:
    network, source = build(), build(1).state_dict()
    load_weights(network, written, seed=5)
    same = {name for name, value in network.state_dict().items() if torch.equal(value, source[name])}
    biases = {"action_proj_in.bias.weight", "action_proj_out.bias.weight"}  # zeros both times
    assert same == {name for name in source if not is_action_head(name)} | biases


def test_pytorch_reads_what_is_written_under_the_frameworks_names(written: Path) -> None:
    """As the framework does: a strict load into tensors of its own names and shapes."""
    source = build(1).state_dict()
    state = {f"net.{to_framework(name)}": torch.empty_like(value) for name, value in source.items()}
    state |= {f"net_ema.{to_framework(name)}": torch.empty_like(value) for name, value in source.items()}
    dcp.load(state, checkpoint_id=written / "iter_000010000" / "model", no_dist=True)
    for name, value in source.items():
        assert torch.equal(state[f"net.{to_framework(name)}"], value)


def test_averages_of_unknown_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="averages of tensors that the network has not"):
        write_framework(build(1).state_dict(), tmp_path / "run", step=1, averages={"other": torch.zeros(1)})
    assert not (tmp_path / "run").exists()


# Two processes write shards of rows and of columns under the framework's names, wrapped as it wraps its layers.
_SHARDED = """
import sys, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from models.cosmos3_policy.checkpoint.weights import load_weights
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.parallelize import shard
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
state = torch.load(sys.argv[1], weights_only=True)
cut = lambda name, t: distribute_tensor(t, mesh, [Shard(1 if t.dim() > 1 and "mlp" in name else 0)])
state = {name.replace(".layers.1.", ".layers.1._orig_mod."): cut(name, value) for name, value in state.items()}
dcp.save(state, checkpoint_id=sys.argv[2])
# the other way round: into a network whose trained half is sharded
with torch.device("meta"):
    network = Cosmos3Policy(Cosmos3PolicyConfig.tiny(vocab_size=64))
shard(network, mesh)
network.to_empty(device="cpu")
load_weights(network, sys.argv[2], keep_action_heads=True)
whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in network.state_dict().items()}
assert sum(isinstance(t, DTensor) for t in network.state_dict().values()) > 20
if dist.get_rank() == 0:
    torch.save(whole, sys.argv[3])
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_shards_of_two_ranks_are_joined_and_cut_for_two_others(tmp_path: Path) -> None:
    source = build(1)
    state = {f"net.{to_framework(name)}": value for name, value in source.state_dict().items()}
    torch.save(state, tmp_path / "state.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command += [sys.executable, "-c", _SHARDED, str(tmp_path / "state.pt"), str(tmp_path / "run" / "model")]
    command += [str(tmp_path / "whole.pt")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((tmp_path / "run" / "model").glob("*.distcp"))) == 2
    network = build()
    load_weights(network, tmp_path / "run", keep_action_heads=True)
    assert digest(network) == digest(source)
    assert weights_digest(torch.load(tmp_path / "whole.pt", weights_only=True)) == digest(source)


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("evil",)


def test_an_index_that_would_run_code_is_refused(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    index = written / "iter_000010000" / "model" / ".metadata"
    index.write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(ValueError, match=r"it names posix\.mkdir, which is no part of an index"):
        load_weights(build(), written)
    assert not (tmp_path / "evil").exists()
    index.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="holds dict, no index"):
        load_weights(build(), written)


def test_what_is_cut_short_or_elsewhere_is_told(written: Path) -> None:
    folder = written / "iter_000010000" / "model"
    with DcpTensors(folder) as stored:
        whole = stored.tensor(EMBED)
        assert stored[EMBED].shape == (64, 64)
        assert torch.equal(whole, build(1).embed_tokens.weight)
        (file,) = stored.files
    index = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(index.replace(file.name.encode(), b"../" + file.name.encode()[3:]))
    with pytest.raises(ValueError, match="names a file outside its folder"):
        DcpTensors(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(FileNotFoundError, match=r"it has no \.metadata"):
        DcpTensors(folder)
    (written / "latest_checkpoint.txt").write_text("../elsewhere")
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        _ = CheckpointFolder(written).weights


@pytest.mark.parametrize("damage", ["cut", "gone", "zeros"])
def test_a_copy_that_is_not_whole_is_told_by_its_file(written: Path, damage: str) -> None:
    folder = written / "iter_000010000" / "model"
    with DcpTensors(folder) as stored:
        (file,) = stored.files
    content = file.read_bytes()
    changed = {"cut": content[: len(content) // 2], "gone": b"", "zeros": bytes(len(content))}[damage]
    file.write_bytes(changed)
    if damage == "gone":
        file.unlink()
    network = build(2)
    before = digest(network)
    words = {"cut": "cut short: " + file.name, "gone": "not there", "zeros": f"{file.name} holds no tensor"}[damage]
    with pytest.raises(FileNotFoundError if damage == "gone" else ValueError, match=words):
        load_weights(network, written, keep_action_heads=True)
    assert digest(network) == before


@pytest.mark.parametrize(
    ("boxes", "shape", "expected"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], (4, 3), ""),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2))], (4, 3), ""),
        ([((), ())], (), ""),
        ([((0,), (0,)), ((0,), (3,))], (3,), ""),
        ([((0, 0), (2, 3)), ((0, 0), (2, 3))], (4, 3), "overlap at (0, 0)"),
        ([((0, 0), (3, 2)), ((1, 1), (3, 2))], (4, 3), "overlap at (1, 1)"),
        ([((0, 0), (2, 3))], (4, 3), "hold 6 of 12 values; files are missing"),
        ([], (4, 3), "hold 0 of 12 values; files are missing"),
        ([((2, 0), (4, 3))], (4, 3), "lie outside its shape (4, 3)"),
        ([((0,), (12,))], (4, 3), "lie outside its shape (4, 3)"),
    ],
)
def test_parts_cover_their_tensor_each_value_once(boxes: list, shape: tuple[int, ...], expected: str) -> None:
    assert uncovered(boxes, shape) == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_parts_that_overlap_and_leave_a_hole_are_told(tmp_path: Path) -> None:
    """As many values as the tensor has, some of them twice: a count alone would pass."""
    folder = tmp_path / "model"
    dcp.save({"a": torch.arange(8.0)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    index = pickle.loads((folder / ".metadata").read_bytes())
    ((place, info),) = index.storage_data.items()
    (chunk,) = index.state_dict_metadata["a"].chunks
    second = type(chunk)(offsets=torch.Size([2]), sizes=torch.Size([4]))
    chunk.sizes = torch.Size([4])
    index.state_dict_metadata["a"].chunks.append(second)
    index.storage_data[type(place)("a", torch.Size([2]))] = info
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"parts of a overlap at \(2,\)"):
        DcpTensors(folder)


def test_parts_without_their_index_are_told_as_that(written: Path) -> None:
    (written / "iter_000010000" / "model" / ".metadata").unlink()
    folder = CheckpointFolder(written)
    assert folder.is_distributed
    with pytest.raises(FileNotFoundError, match=r"\(\*\.distcp\) and no \.metadata, their index"):
        load_weights(build(2), written)
