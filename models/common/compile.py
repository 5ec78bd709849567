"""torch.compile applied in place, with its failures, graphs and seconds counted.

Order of the three things done to a block: checkpointing, then this, then sharding.
"""

from __future__ import annotations

import difflib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._dynamo.exc import RecompileError, TorchDynamoException
from torch._dynamo.utils import counters

from models.common.block_options import INDUCTOR_DEFAULTS, CompileConfig
from models.common.checkpointing import Plan, plans_of

__all__ = ["CompileConfig", "CompileReport", "apply", "apply_to_functions", "inductor_options"]

_log = logging.getLogger(__name__)
# Blocks of one class share their graphs, and each shape, grad mode and training flag is one more.
_GRAPHS_PER_CODE = 64


@dataclass(kw_only=True)
class CompileReport:
    """What was compiled; the numbers grow while the run goes on.

    `graphs` compiled so far; `recompiles` of them in a unit that had run before: a new shape or mode. `seconds` went
    into the calls that compiled, `failures` says why a unit runs uncompiled.
    """

    scope: str
    units: tuple[str, ...] = ()
    graphs: int = 0
    recompiles: int = 0
    seconds: float = 0.0
    failures: dict[str, str] = field(default_factory=dict)
    cache_dir: str | None = None

    def summary(self) -> str:
        """One line for people."""
        if self.scope == "none":
            return "compile: off"
        units = f"{len(self.units) - len(self.failures)} of {len(self.units)}"
        what = "blocks" if self.scope == "blocks" else "parts"
        line = f"compile: {units} {what}, {self.graphs} graphs ({self.recompiles} recompiles) in {self.seconds:.1f} s"
        for reason in dict.fromkeys(self.failures.values()):
            names = [name for name, why in self.failures.items() if why == reason]
            line += f"; uncompiled: {', '.join(names)} ({reason})"
        return line


def apply(
    blocks: Mapping[str, Sequence[nn.Module]], config: CompileConfig, *, backend: str | Callable = "inductor"
) -> CompileReport:
    """Compile each block by itself, in place: it is compiled at its first call, and its names stay.

    Args:
        blocks: modules with a forward of their own (not a bare Sequential) by part.
        config: with another scope than `blocks` nothing is done.
        backend: of torch.compile. Not "eager" for blocks that recompute: it loses the state of their random draws.

    Raises:
        ValueError: unknown inductor options, all of them named.
    """
    if config.scope != "blocks":
        return CompileReport(scope="none")
    units = {f"{part}.{i}": block for part, list_ in blocks.items() for i, block in enumerate(list_)}
    report, options = _prepare(config, tuple(units), backend)
    for name, block in units.items():
        # The attribute behind nn.Module.compile; going through it keeps hooks (FSDP's) outside the graph.
        block._compiled_call_impl = _Unit(
            name, block._call_impl, torch.compile(block._call_impl, **options), plans_of(block), config, report
        )
    return report


def apply_to_functions(
    functions: Mapping[str, tuple[nn.Module, str]], config: CompileConfig, *, backend: str | Callable = "inductor"
) -> CompileReport:
    """Compile methods of modules in place; `functions` holds (module, name of the method) by the name to report."""
    report, options = _prepare(config, tuple(functions), backend)
    for name, (owner, method) in functions.items():
        eager = getattr(owner, method)
        unit = _Unit(name, eager, torch.compile(eager, **options), plans_of(owner), config, report)
        setattr(owner, method, unit)
    return report


def inductor_options(config: CompileConfig) -> dict[str, Any]:
    """Options of `mode`, the defaults and the configuration's own, later ones over earlier ones.

    torch.compile takes either a mode or options; a mode is nothing but options, so all go as options.
    """
    import torch._inductor as inductor

    known = inductor.config.get_config_copy()
    problems = []
    for key in config.inductor:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            problems.append(f"unknown key {key!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    if problems:
        raise ValueError(f"compile.inductor: {'; '.join(problems)}; keys are those of torch._inductor.config")
    return {**inductor.list_mode_options(config.mode, config.dynamic), **INDUCTOR_DEFAULTS, **config.inductor}


def _prepare(
    config: CompileConfig, units: tuple[str, ...], backend: str | Callable
) -> tuple[CompileReport, dict[str, Any]]:
    if config.cache_dir is not None:
        # One folder for each node: kernels are built for its own devices, and ranks of a node share them.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(config.cache_dir).absolute() / socket.gethostname()))
    # The backward is compiled together with the forward: its time is counted, and where it fails the block can still
    # run as it is.
    functorch_config.force_non_lazy_backward_lowering = True
    report = CompileReport(scope=config.scope, units=units, cache_dir=os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
    options: dict[str, Any] = {
        "backend": backend,
        "dynamic": config.dynamic,
        "fullgraph": config.fullgraph,
        "recompile_limit": _GRAPHS_PER_CODE,
    }
    if backend == "inductor":
        options["options"] = inductor_options(config)
        _log.info("compile %s of %s with %s", config.scope, ", ".join(units), options["options"])
    return report, options


class _Unit:
    """One compiled callable and, for when it cannot be compiled, the same uncompiled."""

    def __init__(
        self,
        name: str,
        eager: Callable,
        compiled: Callable,
        plans: tuple[Plan, ...],
        config: CompileConfig,
        report: CompileReport,
    ) -> None:
        self.name = name
        self.eager = eager
        self.compiled = compiled
        self.plans = plans
        self.raises = config.on_failure == "raise"
        self.report = report
        self.has_run = False
        self.failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.failed or any(plan.pending for plan in self.plans):
            return self.eager(*args, **kwargs)
        stats = counters["stats"]
        before, start = stats["unique_graphs"], time.perf_counter()
        try:
            result = self.compiled(*args, **kwargs)
        except RecompileError:  # asked for by torch._dynamo.config.error_on_recompile
            raise
        except Exception as error:
            if not _is_failure(error):
                raise
            self._fail(error)
            return self.eager(*args, **kwargs)
        if counters["stats"]["unique_graphs"] > before:
            self._count(counters["stats"]["unique_graphs"] - before, time.perf_counter() - start)
        self.has_run = True
        return result

    def _count(self, graphs: int, seconds: float) -> None:
        report = self.report
        report.graphs += graphs
        report.seconds += seconds
        if self.has_run:
            report.recompiles += graphs
            if report.recompiles & (report.recompiles - 1) == 0:  # 1, 2, 4, 8 ...: a run of them is no flood of lines
                _log.warning(
                    "compile: %s was compiled again for a new shape or mode, %d recompiles so far (%.1f s in all); "
                    "pad to few shapes, or set compile.dynamic=null",
                    self.name,
                    report.recompiles,
                    report.seconds,
                )

    def _fail(self, error: Exception) -> None:
        reason = _reason(error)
        if self.raises:
            raise RuntimeError(
                f"compile: {self.name} does not compile ({reason}); compile.on_failure=eager runs it as it is"
            ) from error
        known = reason in self.report.failures.values()
        self.failed = True
        self.report.failures[self.name] = reason
        if not known:
            _log.warning("compile: %s does not compile and runs as it is (%s)", self.name, reason)


def _is_failure(error: Exception) -> bool:
    """Whether compiling failed, in contrast to the code that was compiled."""
    return isinstance(error, TorchDynamoException) or "found no compiled frames" in str(error)


def _reason(error: Exception) -> str:
    """Kind and first telling line of a compiler's message, which goes on for pages."""
    lines = [line.strip() for line in str(error).splitlines()]
    return f"{type(error).__name__}: {next(filter(None, _without_preamble(lines)), '')[:200]}"


def _without_preamble(lines: list[str]) -> Iterator[str]:
    """A failure of the backend says first that it was the backend's."""
    for line in lines:
        if not line.startswith("backend=") or not line.endswith("raised:"):
            yield line
