"""Which of how many processes this is, as torchrun tells it; one of one without torchrun."""

import os


def world_size() -> int:
    """Ranks of the run, over all nodes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def under_torchrun() -> bool:
    """Whether something has said how many processes there are."""
    return "WORLD_SIZE" in os.environ


def ranks_per_node() -> int:
    """Ranks on this node: one for each of its devices."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """Number of this rank among all."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Number of this rank on its node, and of its device."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_first() -> bool:
    """Whether this is the rank that writes and reports for the whole run."""
    return os.environ.get("RANK", "0") == "0"


def is_first_of_node() -> bool:
    """Whether this is the rank that speaks for its node: what is missing may be missing there only."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
