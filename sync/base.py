"""The interface of every gradient synchronisation scheme.

All schemes but those of `ring` compute the same sum; they differ in how the bytes travel. The four dimensions in which
they differ are those of Zen (Wang et al., OSDI 2025, section 2).

    gradient = Zen().all_reduce(gradient)                      # over the default group
    future = Zen().all_reduce(gradient, group, async_op=True)  # meanwhile compute; then future.wait()

All schemes of a group stand in one `Line`, because the order in which they send must be the same on all ranks.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gemini_ft import accelerator
from gemini_ft.ordered import Ordered

from .backends import open_exchange
from .exchange import Exchange
from .rows import GradientError, SparseRows, to_matrix, to_rows, to_tensor

T = TypeVar("T")
Result: TypeAlias = torch.Tensor | torch.futures.Future[torch.Tensor]


class Line:
    """The calls of one group. Those in the background share a thread, which ends when the group is gone."""

    def __init__(self) -> None:
        self._one = threading.Lock()
        self._background: Ordered | None = None

    def now(self, call: Callable[[], T]) -> T:
        """Runs a call after all that were put in the background before it."""
        self._refuse_callbacks()
        if self._background is not None:
            self._background.wait()
        with self._one:
            return call()

    def later(self, call: Callable[[], T]) -> torch.futures.Future[T]:
        """Runs a call in the background, on the device stream that is current now."""
        self._refuse_callbacks()
        future: Any = torch.futures.Future()  # its set_exception is annotated as if errors were results
        module = accelerator.in_use()
        stream = module.current_stream() if module is not None else None

        def run() -> None:
            try:
                with self._one:
                    value = _on(module, stream, call)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        self._background = self._background or Ordered("gradient synchronisation")
        self._background.put(run)
        result: torch.futures.Future[T] = future
        return result

    def _refuse_callbacks(self) -> None:
        if self._background is not None and self._background.is_current:
            raise RuntimeError(
                "all_reduce was called from a callback of an earlier one's future: when callbacks run differs from rank to rank, and so "
                "would the order of the calls; wait for the future, then call it"
            )

    def end(self) -> None:
        if self._background is not None:
            self._background.close(timeout=0)


_lines: weakref.WeakKeyDictionary[ProcessGroup, Line] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def line_of(group: ProcessGroup) -> Line:
    """The line that all calls of a group share."""
    with _making:
        if group not in _lines:
            _lines[group] = line = Line()
            weakref.finalize(group, line.end)
        return _lines[group]


def _on(module: Any, stream: Any, call: Callable[[], T]) -> T:
    """Runs a call on the caller's stream, so after the work that is queued there; its results can be used on other streams, too."""
    if stream is None:
        return call()
    with module.stream(stream):
        result = call()
        stream.synchronize()
    return result


class Scheme(ABC):
    """Sums one gradient over all ranks of a group."""

    name: ClassVar[str]
    whole: ClassVar[bool] = False
    """Whether it takes gradients whole, so that those that are dense travel together."""

    @overload
    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup | None = ..., async_op: Literal[False] = ...) -> torch.Tensor: ...
    @overload
    def all_reduce(
        self, tensor: torch.Tensor, group: ProcessGroup | None = ..., *, async_op: Literal[True]
    ) -> torch.futures.Future[torch.Tensor]: ...
    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False) -> Result:
        """The sum of ``tensor`` over all ranks; collective. Every rank gets the same bits.

        Calls on one group take turns in the order of the calls, which must be the same on all ranks.

        Args:
            tensor: float32, float16, bfloat16 or float64; torch.sparse_coo, uncoalesced or with dense dimensions too, or
                torch.strided and mostly zero. The same shape, layout and dtype on all ranks. It stays unchanged, and must
                not be written until the sum is there.
            group: None: the default group.
            async_op: return at once; the sum is computed in the background.

        Returns:
            A new tensor in the shape, layout, dtype and device of ``tensor``, coalesced if sparse; or a future of it.

        Raises GradientError: the ranks' tensors do not fit each other, or one is not accepted. On all ranks, with the same text; from the
        future, if async.
        """
        chosen = group if group is not None else dist.group.WORLD
        if chosen is None:
            raise RuntimeError("there is no process group: call torch.distributed.init_process_group first, or give group=")
        if not isinstance(chosen, ProcessGroup):
            raise RuntimeError("this rank is not a member of the group it gave; only members may call all_reduce")
        line = line_of(chosen)
        if async_op:
            return line.later(lambda: self._sum(tensor, chosen))
        return line.now(lambda: self._sum(tensor, chosen))

    @abstractmethod
    def _sum(self, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor: ...

    def state_dict(self) -> dict[str, Any]:
        """All state, beside the gradient, that the next sum depends on, as plain data; only adaptive schemes have any."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{self.name} has no state; given {sorted(state)}: was it another scheme's?")

    @property
    def _title(self) -> str:
        """The scheme, with all that must be the same on all ranks."""
        return self.name

    def _describe(self, tensor: torch.Tensor) -> str:
        """A text that must be the same on all ranks."""
        sparse = f" with {tensor.sparse_dim()} sparse dimensions" if tensor.layout == torch.sparse_coo else ""
        return f"{self._title} of {tuple(tensor.shape)} {tensor.dtype} {tensor.layout}{sparse}"


class SparseScheme(Scheme):
    """A scheme that only decides the way of the units."""

    @abstractmethod
    def reduce(self, gradient: SparseRows, exchange: Exchange) -> SparseRows:
        """The sum over all ranks, indices ascending; begins with an `Exchange.all_to_all` or `Exchange.share`."""

    def _sum(self, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        nothing = SparseRows(rows=0, indices=torch.zeros(0, dtype=torch.int64), values=torch.zeros(0, 0))
        gradient, exchange = _admitted(tensor, group, self._describe(tensor), to_rows, nothing)
        return to_tensor(self.reduce(gradient.to(exchange.device), exchange), tensor)


def _admitted(tensor: torch.Tensor, group: ProcessGroup, text: str, convert: Callable[[torch.Tensor], T], nothing: T) -> tuple[T, Exchange]:
    """A rank's gradient, converted, and the exchange; ``nothing`` if it is refused: this rank takes part until all raise."""
    try:
        return convert(tensor), open_exchange(group, tensor.device, text)
    except GradientError as error:
        return nothing, open_exchange(group, tensor.device, text, str(error))


def admit_dense(tensor: torch.Tensor, group: ProcessGroup, text: str) -> tuple[torch.Tensor, Exchange]:
    """A copy of a rank's gradient as a dense matrix where messages lie, and the exchange, over which all ranks have agreed.

    Raises GradientError: the ranks' tensors do not fit each other, or one is not accepted.
    """
    matrix, exchange = _admitted(tensor, group, text, to_matrix, torch.zeros(0, 0))
    exchange.agree()
    return matrix.to(exchange.device), exchange
