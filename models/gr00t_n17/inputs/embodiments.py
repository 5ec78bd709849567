"""Embodiment tags and the slots of the per-embodiment layers they use."""

import difflib
import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

NEW_EMBODIMENT = "new_embodiment"
"""The tag of a robot the released checkpoint does not know."""

SLOTS: Mapping[str, int] = {
    "simpler_env_google": 0,
    "simpler_env_widowx": 1,
    "libero_sim": 2,
    NEW_EMBODIMENT: 10,
    "robocasa_panda_omron": 10,
    "robocasa_gr1_tabletop": 10,
    "unitree_g1_sonic": 11,
    "oxe_droid_relative_eef_relative_joint": 24,
    "real_g1_relative_eef_relative_joints": 25,
    "unitree_g1_full_body_with_waist_height_nav_cmd": 25,
    "real_r1_pro_sharpa_relative_eef": 26,
    "real_r1_pro_sharpa_relative_eef_human": 26,
    "real_r1_pro_sharpa_relative_eef_maxinsights": 26,
    "real_r1_pro_sharpa_relative_eef_mecka": 26,
    "xdof_relative_eef_relative_joint": 27,
    "xdof_relative_eef_relative_joint_subtask": 27,
}
"""Released tags, by slot."""


def merge(stored: Mapping[str, int]) -> dict[str, int]:
    """Tags of a checkpoint's embodiment_id.json, which decides, and after them the released ones it does not name."""
    return {**stored, **{tag: slot for tag, slot in SLOTS.items() if tag not in stored}}


def slot_of(tag: str, ids: Mapping[str, int] | None = None) -> int:
    """Slot of a tag; `ids` is a merged table, None the released one.

    Raises:
        ValueError: no such tag; names the nearest and all that there are.
    """
    table = SLOTS if ids is None else ids
    if tag in table:
        return table[tag]
    near = difflib.get_close_matches(tag, table, n=1, cutoff=0.4)
    raise ValueError(
        f"embodiment {tag!r} is not known{f'; the nearest is {near[0]!r}' if near else ''}. Known are "
        f"{', '.join(sorted(table))}. A new robot takes {NEW_EMBODIMENT!r}; a slot by number is embodiment_id"
    )


def tag_of(slot: int, ids: Mapping[str, int] | None = None) -> str:
    """A tag for a slot that was given by its number: `new_embodiment`, the first there is, or `embodiment_<slot>`."""
    table = SLOTS if ids is None else ids
    if table.get(NEW_EMBODIMENT) == slot:
        return NEW_EMBODIMENT
    return next((tag for tag, number in table.items() if number == slot), f"embodiment_{slot}")
