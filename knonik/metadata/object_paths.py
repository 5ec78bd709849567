"""Which object holds which episode: path templates as declared, as the standard says, and as the files really lie."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from knonik.metadata.episode_rows import EpisodeRows
from knonik.metadata.files import MetadataError

logger = logging.getLogger(__name__)

DATA_TEMPLATES = (
    "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
)
VIDEO_TEMPLATES = (
    "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
)


def data_paths(
    info: Mapping[str, Any], rows: EpisodeRows, chunks_size: int, present: Collection[str]
) -> tuple[list[str], bool]:
    """Key of every episode's Parquet file, and whether each episode has a file of its own."""
    return _resolve(info, "data_path", DATA_TEMPLATES, rows, "data", None, chunks_size, present)


def video_paths(
    info: Mapping[str, Any], rows: EpisodeRows, camera: str, chunks_size: int, present: Collection[str]
) -> tuple[list[str], bool]:
    """Key of every episode's video of one camera, and whether each episode has a file of its own."""
    prefix = f"videos/{camera}"
    return _resolve(info, "video_path", VIDEO_TEMPLATES, rows, prefix, camera, chunks_size, present)


def _resolve(
    info: Mapping[str, Any],
    template_key: str,
    defaults: Sequence[str],
    rows: EpisodeRows,
    column_prefix: str,
    camera: str | None,
    chunks_size: int,
    present: Collection[str],
) -> tuple[list[str], bool]:
    """The declared template is tried first, then the standard ones of both generations, each also with the folder
    `video` in place of `videos`: the first under which all objects exist wins.
    """
    ids = rows.ints("episode_index")
    chunk, file = (rows.columns.get(f"{column_prefix}/{name}") for name in ("chunk_index", "file_index"))
    declared = info.get(template_key)
    candidates = [str(declared)] if declared else []
    candidates += [template for template in defaults if template not in candidates]
    candidates += [
        f"video/{template.removeprefix('videos/')}" for template in candidates if template.startswith("videos/")
    ]
    failures = []
    for template in candidates:
        joined = "{chunk_index" in template or "{file_index" in template
        if joined and (chunk is None or file is None):
            failures.append(
                f"{template} needs columns {column_prefix}/chunk_index and file_index, which {rows.source} lacks"
            )
            continue
        try:
            paths = [
                template.format(
                    episode_index=episode,
                    episode_chunk=episode // chunks_size,
                    chunk_index=int(chunk[i]) if chunk is not None else 0,
                    file_index=int(file[i]) if file is not None else 0,
                    video_key=camera,
                )
                for i, episode in enumerate(ids.tolist())
            ]
        except (KeyError, ValueError, IndexError) as error:
            failures.append(f"{template} cannot be filled in ({error!r})")
            continue
        missing = [path for path in paths if path not in present]
        if not missing:
            if declared and template != declared:
                logger.warning(
                    "meta/info.json: %s %r does not match the files; they follow %r", template_key, declared, template
                )
            return paths, not joined
        failures.append(f"{template}: {len(missing)} of {len(paths)} are missing, the first is {missing[0]}")
    what = f"video files of camera {camera}" if camera else "data files"
    raise MetadataError(
        f"meta/info.json: no {template_key} template leads to all {what}. Tried: " + "; ".join(failures)
    )
