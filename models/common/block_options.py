"""How the transformer blocks of a model are compiled and which of them recompute their activations: values only.

Nothing here imports torch, so that a configuration can be checked at once; `models.common.compile` and
`models.common.checkpointing` apply it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

CompileScope = Literal["none", "blocks", "model"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
CheckpointingMode = Literal["none", "full", "selective", "layers", "auto"]

# Off for two reasons: the backward of scale-and-shift patterns of adaptive norms can come out wrong without an error
# (pytorch issue 193061), and its kernels ask for more shared memory than some GPUs have.
INDUCTOR_DEFAULTS: Mapping[str, Any] = MappingProxyType({"triton.mix_order_reduction": False})


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """torch.compile, in place: parameter names stay.

    Raises:
        ValueError: naming everything that is wrong.
    """

    scope: CompileScope = "none"
    """`blocks`: each transformer block by itself; `model`: the device work of a step in as few graphs as it has."""
    mode: CompileMode = "default"
    dynamic: bool | None = False
    """false: one graph for each shape; null lets PyTorch make sizes dynamic after the first change."""
    fullgraph: bool = True
    """A block that would fall into several graphs is a failure."""
    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Options of torch._inductor.config by dotted key, over those of `mode` and `INDUCTOR_DEFAULTS`."""
    on_failure: Literal["eager", "raise"] = "eager"
    """A block that does not compile runs as it is, with one warning that names it, or ends the run."""
    cache_dir: str | None = None
    """Folder of compiled kernels, one below it for each node; null keeps PyTorch's own in the temporary folder."""

    def __post_init__(self) -> None:
        problems = [
            _not_one_of("scope", self.scope, CompileScope),
            _not_one_of("mode", self.mode, CompileMode),
            _not_one_of("on_failure", self.on_failure, Literal["eager", "raise"]),
            _not_one_of("dynamic", self.dynamic, Literal[True, False, None]),
            _not_one_of("fullgraph", self.fullgraph, Literal[True, False]),
        ]
        if isinstance(self.inductor, Mapping):
            object.__setattr__(self, "inductor", dict(_flat(self.inductor)))
            problems += [
                f"inductor.{key}={value!r}: expected a number, a word, true, false or null"
                for key, value in self.inductor.items()
                if not isinstance(value, str | int | float | bool | None)
            ]
        else:
            problems.append(f"inductor={self.inductor!r}: expected a section of keys such as max_autotune: true")
        _raise("compile", problems)


@dataclass(frozen=True, kw_only=True)
class CheckpointingConfig:
    """Activation checkpointing: which blocks keep only their input and compute the rest again in the backward pass.

    Raises:
        ValueError: naming everything that is wrong.
    """

    mode: CheckpointingMode = "none"
    """`full`: every block; `selective`: every block, except the results of the operations in `save`; `layers`: the
    blocks chosen by one of the keys below; `auto`: as few as `memory_gb` allows."""
    last_k: int | None = None
    """Mode `layers`: the last k blocks of each part recompute."""
    every_k: int | None = None
    """Mode `layers`: blocks 0, k, 2 k ... of each part recompute."""
    layers: tuple[int, ...] | None = None
    """Mode `layers`: these blocks of each part recompute, counted from 0, or from the end with a minus."""
    save: tuple[str, ...] | None = None
    """Mode `selective`: operations whose results are kept, e.g. `aten.mm` or `aten._scaled_dot_product_*`; null means
    matrix products and attention."""
    memory_gb: float | None = None
    """Mode `auto`: GB (1e9 bytes) for what the blocks keep from forward to backward in one micro-batch."""
    parts: tuple[str, ...] | None = None
    """Parts of the model, by the names it gives them; null means every part that keeps anything."""

    def __post_init__(self) -> None:
        for name in ("layers", "save", "parts"):
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                object.__setattr__(self, name, tuple(value))
        problems = [_not_one_of("mode", self.mode, CheckpointingMode)]
        choices = {name: getattr(self, name) for name in ("last_k", "every_k", "layers")}
        given = [name for name, value in choices.items() if value is not None]
        if self.mode == "layers" and len(given) != 1:
            found = f"{' and '.join(given)} are set" if given else "none is set"
            problems.append(f"mode=layers: exactly one of last_k, every_k and layers is needed, {found}")
        if self.mode == "auto" and self.memory_gb is None:
            problems.append("mode=auto: memory_gb is needed, the GB that activations may take")
        # With mode none everything else rests, so that one override switches a recipe's choice off.
        if self.mode in ("full", "selective", "layers", "auto"):
            owners = {"last_k": "layers", "every_k": "layers", "layers": "layers", "save": "selective"}
            for name, owner in {**owners, "memory_gb": "auto"}.items():
                if getattr(self, name) is not None and self.mode != owner:
                    problems.append(f"{name} is read in mode={owner} only, and mode={self.mode}: set it to null")
        problems += [
            f"{name}={choices[name]!r}: a whole number from 1 on is needed"
            for name in ("last_k", "every_k")
            if choices[name] is not None and not (_is_int(choices[name]) and choices[name] >= 1)
        ]
        problems += [self._list_problem("layers", _is_int, "block numbers")]
        problems += [self._list_problem("save", lambda x: isinstance(x, str), "names of operations")]
        problems += [self._list_problem("parts", lambda x: isinstance(x, str), "names of parts")]
        if self.memory_gb is not None and not (_is_number(self.memory_gb) and self.memory_gb > 0):
            problems.append(f"memory_gb={self.memory_gb!r}: a number above 0 is needed")
        _raise("checkpointing", problems)

    def _list_problem(self, name: str, fits: Any, what: str) -> str | None:
        value = getattr(self, name)
        if value is None:
            return None
        if isinstance(value, tuple) and value and all(map(fits, value)) and len(set(value)) == len(value):
            return None
        return f"{name}={list(value) if isinstance(value, tuple) else value!r}: a list of {what}, each once, is needed"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested sections as dotted keys: command-line overrides arrive nested."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _not_one_of(name: str, value: Any, kind: Any) -> str | None:
    allowed = get_args(kind)
    if any(value is choice or (isinstance(choice, str) and value == choice) for choice in allowed):
        return None
    words = ["null" if a is None else str(a).lower() if isinstance(a, bool) else a for a in allowed]
    return f"{name}={value!r}: one of {', '.join(words)}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _raise(section: str, problems: list[str | None]) -> None:
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ValueError(f"{section}: " + "; ".join(found))
