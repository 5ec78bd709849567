"""Statistics of relative actions over a dataset's columns, kept beside them: one computation per dataset and groups."""

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.sources import rows_of

if TYPE_CHECKING:  # importing these takes seconds; `show` and configuration errors must not wait for them
    from knonik import Dataset
    from models.gr00t_n17.inputs.modality import ActionGroup, Modalities
    from models.gr00t_n17.inputs.normalize import Numbers

logger = logging.getLogger(__name__)


def relative_statistics(
    dataset: "Dataset", modalities: "Modalities", *, fps: float | None = None
) -> "dict[str, Numbers]":
    """{action group: {min, max, mean, std, q01, q99}}, each [horizon, D], of every group learnt relative to the state.

    Counted over every full chunk of the episodes in use, and kept on local disk by the dataset's fingerprint, the
    episodes, the group and the steps, wherever the dataset lies. The ranks of a node compute them once.

    Args:
        fps: of a mixture: steps of the chunk are 1 / fps seconds; None counts the dataset's own rows.

    Raises:
        ValueError: no episode is as long as a chunk, or values are not finite; names the group and its columns.
    """
    deltas = rows_of(modalities.action_deltas, dataset, fps)
    return {group.name: _kept(dataset, modalities, group, deltas) for group in modalities.relative}


def _kept(dataset: "Dataset", modalities: "Modalities", group: "ActionGroup", deltas: list[int]) -> "Numbers":
    from knonik.cache import one_builder, replacing
    from knonik.columns.arrays import columns_folder

    reference = modalities.state_group(group.reference)
    said = [
        [group.column, group.start, group.stop, group.type, group.format],
        [reference.column, reference.start, reference.stop],
        deltas,
        dataset.fingerprint,
        hashlib.sha256(dataset.episodes.ids.astype("<i8").tobytes()).hexdigest(),
    ]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:24]
    folder = columns_folder(dataset.folder, dataset.episodes)
    path = folder / f"relative-{digest}.json"
    shape = (len(deltas), group.dim)
    found = _stored(path, shape)
    if found is None:
        with one_builder(folder, "statistics"):
            found = _stored(path, shape)
            if found is None:
                found = _computed(dataset, modalities, group, deltas)
                with replacing(path) as temporary:
                    temporary.write_text(json.dumps({name: values.tolist() for name, values in found.items()}))
    return found


def _computed(dataset: "Dataset", modalities: "Modalities", group: "ActionGroup", deltas: list[int]) -> "Numbers":
    import numpy as np

    from models.gr00t_n17.inputs.relative_actions import relative_statistics as compute

    reference = modalities.state_group(group.reference)
    columns = dataset.columns(list(dict.fromkeys((reference.column, group.column))))
    logger.info("statistics of %s relative to %s over %d chunk steps", group.name, reference.name, len(deltas))
    return compute(
        columns[reference.column],
        columns[group.column],
        first_row=np.asarray(dataset.episodes.first_row, np.int64),
        length=np.asarray(dataset.episodes.length, np.int64),
        group=group,
        reference=reference,
        deltas=deltas,
    )


def _stored(path: Path, shape: tuple[int, int]) -> "Numbers | None":
    if not path.exists():
        return None
    import numpy as np

    from models.gr00t_n17.inputs.normalize import FIELDS

    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
        found = {name: np.array(stored[name], np.float64) for name in FIELDS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("relative statistics in %s are damaged (%s); they are computed again", path, error)
        return None
    if any(values.shape != shape for values in found.values()):
        logger.warning("relative statistics in %s have another shape than %s; they are computed again", path, shape)
        return None
    return found
