"""The structure promised in the design: who may import whom, one home for risky libraries, files of readable size."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("recipes", "knonik", "models", "callbacks")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.relative_to(ROOT)}: relative import"
            yield node.module


def importers(library: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if any(name == library or name.startswith(f"{library}.") for name in imported(path))
    }


@pytest.mark.parametrize("package", ["knonik", "models", "callbacks"])
def test_parts_import_neither_each_other_nor_recipes(package: str) -> None:
    forbidden = set(PACKAGES) - {package}
    for path in (ROOT / package).rglob("*.py"):
        crossing = {name for name in imported(path) if name.split(".")[0] in forbidden}
        assert not crossing, f"{path.relative_to(ROOT)} imports {crossing}"


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("av", {"knonik/video/decode.py", "knonik/video/encode.py"}),
        ("boto3", {"knonik/stores/s3.py"}),
        ("botocore", {"knonik/stores/s3.py"}),
        ("obstore", {"knonik/stores/s3.py"}),
        ("PIL", {"knonik/video/images.py", "knonik/peek.py"}),
        ("wandb", set()),
    ],
)
def test_risky_libraries_stay_where_they_are(library: str, homes: set[str]) -> None:
    assert importers(library) == homes


def test_only_the_data_module_of_knonik_needs_lightning() -> None:
    assert {path for path in importers("lightning") if path.startswith("knonik/")} == {"knonik/datamodule.py"}


def test_files_stay_readable() -> None:
    tests = list((ROOT / "tests").rglob("*.py")) + list((ROOT / "benchmarks").rglob("*.py"))
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in SOURCES + tests}
    assert {path: lines for path, lines in lengths.items() if lines > 400} == {}


def test_no_pickle_from_files() -> None:
    """Checkpoints are read with weights_only, arrays without pickled objects."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("weights_only") == "True", f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("allow_pickle", "False") == "False", f"{path}:{node.lineno}"
    # an unpickler that knows the few plain classes of a checkpoint's index and refuses all other names
    assert importers("pickle") == {"models/common/dcp_tensors.py"}
