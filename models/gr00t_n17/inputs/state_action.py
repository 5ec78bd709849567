"""State and action columns of a batch to the network's vectors and back, group by group."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.gr00t_n17.inputs.modality import Group, Modalities
from models.gr00t_n17.inputs.normalize import GroupNormalizer, MeanStd, Normalizer, Numbers, SinCos, Statistics
from models.gr00t_n17.inputs.relative_actions import to_absolute, to_relative
from models.gr00t_n17.inputs.settings import ProcessorConfig

Columns = Mapping[str, NDArray[Any]]


class StateAction:
    """The arithmetic of one embodiment.

    Args:
        modalities: groups of the columns, in the order of the network's vectors.
        statistics: of every group; groups learnt relative to the state need `relative_action`.
        settings: percentiles, clipping, relative actions, sine and cosine.

    Attributes:
        state_dim, action_dim: widths of the vectors before padding.
        relative: names of the action groups learnt as differences to the state.

    Raises:
        ValueError: statistics are absent, or of another width or number of steps; names the group.
    """

    def __init__(self, modalities: Modalities, statistics: Statistics, settings: ProcessorConfig) -> None:
        self.modalities = modalities
        self.relative = {group.name for group in modalities.relative if settings.use_relative_action}
        clip = settings.clip_outliers
        angles = set(modalities.sin_cos) if settings.apply_sincos_state_encoding else set()
        self.state_normalizers: dict[str, GroupNormalizer] = {}
        for state in modalities.state:
            if state.name in angles:
                self.state_normalizers[state.name] = SinCos(state.dim)
                continue
            numbers = _numbers(statistics.state, state, "state")
            self.state_normalizers[state.name] = (
                MeanStd(numbers, clip=False)
                if state.name in modalities.mean_std_state
                else Normalizer(numbers, use_percentiles=settings.use_percentiles, clip=clip)
            )
        self.action_normalizers: dict[str, GroupNormalizer] = {}
        for group in modalities.action:
            is_relative = group.name in self.relative
            section = "relative_action" if is_relative else "action"
            numbers = _numbers(
                getattr(statistics, section), group, section, modalities.horizon if is_relative else None
            )
            self.action_normalizers[group.name] = (
                MeanStd(numbers, clip=clip)
                if group.name in modalities.mean_std_action
                else Normalizer(numbers, use_percentiles=settings.use_percentiles and not is_relative, clip=clip)
            )
        self.state_dim = sum(normalizer.width for normalizer in self.state_normalizers.values())
        self.action_dim = sum(normalizer.dim for normalizer in self.action_normalizers.values())

    def state(self, columns: Columns) -> NDArray[np.float32]:
        """Columns [B, T, D] in robot units -> float32 [B, T, state_dim]."""
        parts = [self.state_normalizers[g.name].forward(_values(g, columns)) for g in self.modalities.state]
        return np.concatenate(parts, axis=-1)

    def action(self, columns: Columns, state: Columns) -> NDArray[np.float32]:
        """Columns [B, H, D] in robot units, and raw states [B, T, D] -> float32 [B, H, action_dim].

        Relative groups refer to the last of the T states, and are float64 until the vector is complete.
        """
        parts = []
        for group in self.modalities.action:
            values = _values(group, columns)
            if group.name in self.relative:
                reference = _values(self.modalities.state_group(group.reference), state)[:, -1]
                values = to_relative(values, reference, group)
            parts.append(self.action_normalizers[group.name].forward(values))
        return np.concatenate(parts, axis=-1).astype(np.float32)

    def decode(self, values: NDArray[np.float32], state: Columns | None) -> dict[str, NDArray[np.float32]]:
        """Normalised actions [B, H, >= action_dim] -> {group: float32 [B, horizon, D]} in robot units.

        Args:
            state: raw columns [B, T, D] or [B, D]; needed where groups are relative.
        """
        if self.relative and state is None:
            raise ValueError(
                f"the actions {sorted(self.relative)} are relative to the state: give decode_actions the raw state of "
                "the observation"
            )
        out, start = {}, 0
        for group in self.modalities.action:
            normalizer = self.action_normalizers[group.name]
            part = values[:, : self.modalities.horizon, start : start + normalizer.dim]
            decoded = normalizer.inverse(part)
            if group.name in self.relative and state is not None:
                reference = _values(self.modalities.state_group(group.reference), state)
                reference = reference[:, -1] if reference.ndim == 3 else reference
                decoded = to_absolute(decoded, reference, group)
            out[group.name] = decoded.astype(np.float32)
            start += normalizer.dim
        return out

    def groups(self, columns: Columns) -> dict[str, NDArray[Any]]:
        """Action columns [..., D] cut into groups, in robot units: what `decode` is compared with."""
        return {group.name: group.of(columns) for group in self.modalities.action}


def by_group(
    modalities: Modalities, columns: Mapping[str, Mapping[str, Any]], relative: Mapping[str, Numbers] | None = None
) -> Statistics:
    """Statistics of the groups out of those of whole columns, and of relative actions as they are.

    Raises:
        ValueError: a column has no statistics, or too few elements; names it.
    """
    used = dict.fromkeys(group.column for group in (*modalities.state, *modalities.action))
    if missing := [column for column in used if column not in columns]:
        raise ValueError(f"no statistics for {missing}; given are {sorted(columns)}")

    def part(group: Group) -> Numbers:
        numbers = {
            name: np.atleast_1d(np.asarray(values, np.float64)) for name, values in columns[group.column].items()
        }
        short = [name for name, values in numbers.items() if len(values) < group.stop]
        if short:
            raise ValueError(
                f"group {group.name} is {group.start}..{group.stop} of {group.column}, whose {short[0]} has "
                f"{len(numbers[short[0]])} elements"
            )
        return {name: values[group.start : group.stop] for name, values in numbers.items()}

    return Statistics(
        state={group.name: part(group) for group in modalities.state},
        action={group.name: part(group) for group in modalities.action},
        relative_action=dict(relative or {}),
    )


def _numbers(statistics: Mapping[str, Numbers], group: Group, section: str, steps: int | None = None) -> Numbers:
    if group.name not in statistics:
        raise ValueError(f"no {section} statistics for the group {group.name}; given are {sorted(statistics)}")
    numbers = statistics[group.name]
    expected = (group.dim,) if steps is None else (steps, group.dim)
    for name, values in numbers.items():
        if values.shape != expected:
            raise ValueError(
                f"{section} statistics of {group.name}: {name} has the shape {list(values.shape)}, expected is "
                f"{list(expected)}"
                + ("" if steps is None else " ([horizon, elements]: they hold for one horizon only)")
            )
    return numbers


def _values(group: Group, columns: Columns) -> NDArray[Any]:
    values = group.of(columns)
    if values.shape[-1] != group.dim:
        raise ValueError(
            f"{group.column!r} has {columns[group.column].shape[-1]} dimensions, its statistics have {group.stop}"
        )
    return values
