"""Fixtures shared by all tests: where the real sample datasets are, and a report line on whether they were used."""

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_report_header() -> str:
    if SHARED_DATA.is_dir():
        return f"real datasets: {SHARED_DATA}"
    return "real datasets: none beside the repository, tests on real data are skipped and generated sets are used"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real sample datasets; skips where it does not exist."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no shared/data folder beside the repository")
    return SHARED_DATA
