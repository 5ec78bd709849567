"""The trained head as one CUDA graph per shape: its kernels are launched together instead of one by one. Exact.

A shape is captured when it comes the second time. Everything that is drawn or read on the host happens outside: noise
and time are arguments, masks are data. Dropout draws inside, from the seed of the step, as it does without a graph. A
shape that is new, that cannot be captured or for which there is no room runs as usual; nothing is ever given up for it.

Worth it where launching takes longer than computing, at some 16 samples per GPU or less. A graph holds its gradients
and what the forward pass keeps, so there are few of them. With DDP the sum over the ranks begins when the whole
backward pass is done, since its gradients arrive together.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

Function = Callable[..., Tensor]


class Capture(Protocol):
    """Turns a function into one that replays it on other values of the same shapes."""

    def __call__(self, function: Function, owner: nn.Module, args: tuple[Any, ...]) -> Function: ...


class HeadGraphs:
    """Stands in for `function`: tensors and plain values in, a scalar with gradients out.

    Args:
        function: what is captured.
        owner: the module whose parameters it uses. In eval mode or without gradients the function itself is called.
        capture: makes a graph; `CudaCapture()` for a GPU.
        accumulates: several backward passes run before the gradients are dropped.
        limit: graphs held at most.
    """

    def __init__(
        self, function: Function, owner: nn.Module, capture: Capture, *, accumulates: bool = False, limit: int = 4
    ) -> None:
        self.function = function
        self.limit = limit
        self.replays = self.eager = 0
        self.failures: dict[Any, str] = {}
        self._owner, self._capture, self._accumulates = owner, capture, accumulates
        self._graphs: dict[Any, Function] = {}
        self._seen: set[Any] = set()
        self._own: list[tuple[nn.Parameter, Tensor]] = []
        self._full = False

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        if named or not (self._owner.training and torch.is_grad_enabled()):
            return self.function(*args, **named)
        key = self._key(args)
        graph = self._graphs.get(key)
        if graph is None and key in self._seen and key not in self.failures:
            graph = self._captured(key, args)
        self._seen.add(key)
        if graph is None:
            self.eager += 1
            return self.function(*args)
        self.replays += 1
        if self._accumulates:
            self._own_gradients()
        # A copy: the next replay writes over a graph's output, and a loss is read much later.
        return graph(*(arg for arg in args if isinstance(arg, Tensor))).clone()

    @property
    def captured(self) -> int:
        """Graphs held."""
        return len(self._graphs)

    def _captured(self, key: Any, args: tuple[Any, ...]) -> Function | None:
        if len(self._graphs) >= self.limit:
            if not self._full:
                self._full = True
                logger.info("graphs: %d shapes have one, others run without", self.limit)
            return None
        try:
            self._graphs[key] = self._capture(self.function, self._owner, args)
        except Exception as error:  # whatever it is, the step can run without a graph
            self.failures[key] = " ".join(str(error).split())[:200] or type(error).__name__
            logger.warning("graphs: a shape runs without one, it cannot be captured: %s", self.failures[key])
            return None
        logger.info("graphs: %d captured", len(self._graphs))
        return self._graphs[key]

    def _own_gradients(self) -> None:
        """Give parameters without a gradient one of zeros: autograd would else take the graph's own buffer for it,
        which the next micro-batch overwrites before it is added."""
        if not self._own:
            self._own = [(p, torch.zeros_like(p)) for p in self._owner.parameters() if p.requires_grad]
        missing = [(p, zeros) for p, zeros in self._own if p.grad is None]
        if missing:
            torch._foreach_zero_([zeros for _, zeros in missing])
        for parameter, zeros in missing:
            parameter.grad = zeros

    @staticmethod
    def _key(args: tuple[Any, ...]) -> Any:
        """What a graph is bound to: shapes, dtypes, plain values, and the autocast in force."""
        device = next((arg.device.type for arg in args if isinstance(arg, Tensor)), "cpu")
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        parts = [
            (arg.shape, arg.dtype, arg.device, arg.requires_grad) if isinstance(arg, Tensor) else arg for arg in args
        ]
        return (cast, *parts)


class CudaCapture:
    """Captures forward and backward pass; all graphs share one pool of memory, as only one is in use at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Function, owner: nn.Module, args: tuple[Any, ...]) -> Function:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if wrong := sorted({arg.device.type for arg in tensors} - {"cuda"}):
            raise ValueError(f"an argument lies on the {wrong[0]}")
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        device = tensors[0].device
        samples = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in tensors)
        enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        state = torch.cuda.get_rng_state(device)  # the trial runs draw
        try:
            # Without the cache of cast weights, which would outlive the region it was made in.
            with torch.autocast("cuda", enabled=enabled, dtype=dtype, cache_enabled=False):
                bound: Any = _Bound(function, owner, args)
                graph: Any = torch.cuda.make_graphed_callables(bound, samples, allow_unused_input=True, pool=self._pool)
        finally:
            torch.cuda.set_rng_state(state, device)
        return graph  # type: ignore[no-any-return]


class _Bound(nn.Module):
    """A function as a module of its tensors alone: capturing looks for parameters in a module."""

    def __init__(self, function: Function, owner: nn.Module, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.owner = owner
        self._function = function
        self._plain = [None if isinstance(arg, Tensor) else (arg,) for arg in args]

    def forward(self, *tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        return self._function(*(next(rest) if plain is None else plain[0] for plain in self._plain))
