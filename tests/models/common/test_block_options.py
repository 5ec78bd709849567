"""What may be said about compiling and recomputing blocks, and that every mistake is named at once."""

import subprocess
import sys
from typing import Any

import pytest

from models.common.block_options import CheckpointingConfig, CompileConfig


def test_defaults_do_nothing() -> None:
    assert CompileConfig().scope == "none"
    assert CheckpointingConfig().mode == "none"


def test_nested_inductor_options_become_dotted_keys() -> None:
    config = CompileConfig(inductor={"triton": {"cudagraphs": False}, "triton.unique_kernel_names": True})
    assert config.inductor == {"triton.cudagraphs": False, "triton.unique_kernel_names": True}


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        (
            {"scope": "block", "mode": "fast", "dynamic": "yes", "on_failure": "skip", "inductor": {"a": [1]}},
            ["scope='block'", "blocks, model", "mode='fast'", "true, false, null", "on_failure='skip'", "inductor.a"],
        ),
        ({"fullgraph": 1}, ["fullgraph=1: one of true, false"]),
        ({"inductor": ["max_autotune"]}, ["inductor="]),
    ],
)
def test_every_problem_of_compile_is_named(values: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^compile: ") as caught:
        CompileConfig(**values)
    assert [message for message in messages if message not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({"mode": "layers"}, ["exactly one of last_k, every_k and layers"]),
        ({"mode": "layers", "last_k": 2, "every_k": 2}, ["last_k and every_k are set"]),
        ({"mode": "layers", "last_k": 0, "memory_gb": -1.0}, ["last_k=0", "memory_gb is read in mode=auto", "above 0"]),
        ({"mode": "auto"}, ["memory_gb is needed"]),
        ({"mode": "full", "save": ["aten.mm"], "parts": []}, ["save is read in mode=selective only", "parts=[]"]),
        ({"mode": "layers", "layers": [1, 1]}, ["layers=[1, 1]"]),
        ({"mode": "some"}, ["mode='some': one of none, full, selective, layers, auto"]),
    ],
)
def test_every_problem_of_checkpointing_is_named(values: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^checkpointing: ") as caught:
        CheckpointingConfig(**values)
    assert [message for message in messages if message not in str(caught.value)] == []


def test_mode_none_lets_the_rest_of_a_recipe_stand() -> None:
    assert CheckpointingConfig(mode="none", last_k=4, memory_gb=20).mode == "none"


def test_options_are_checked_without_torch() -> None:
    code = "import sys, models.common.block_options; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)
