"""gemini_ft.state.copies: any part of any tensor to bytes and back, in logical order, planned once."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import pytest
import torch
from capture_kit import shard_of, slot_of
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.core.layout import ITEMSIZES, TensorSpec, build_layout
from gemini_ft.errors import LayoutMismatchError
from gemini_ft.state.copies import as_bytes, boxes, copy_into, plan_copies
from gemini_ft.state.copy_plan import CopyPlan
from gemini_ft.state.tensors import Source

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # torch says so once per process


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A contiguous tensor of arbitrary bit patterns."""
    count = math.prod(shape) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    raw = (torch.arange(count, dtype=torch.int64) * 37 + 11) % (2 if dtype is torch.bool else 256)
    return raw.to(torch.uint8).view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in logical order, by the plainest way there is."""
    return bytes(tensor.clone().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).tolist())


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any strides: dimensions permuted, some sliced with a step."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    base = filled(tuple(size * step for size, step in zip(shape, steps, strict=True)), torch.int32)
    return base[tuple(slice(None, None, step) for step in steps)].permute(draw(st.permutations(range(len(shape)))))


@given(strided(), st.data())
def test_boxes_are_the_elements_in_logical_order(tensor: torch.Tensor, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    found = list(boxes(tensor, start, stop))
    assert [value for box in found for value in box.flatten().tolist()] == tensor.flatten()[start:stop].tolist()
    assert len(found) <= max(1, 2 * tensor.dim() - 1)
    assert all(box.numel() for box in found)
    assert all(box.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for box in found), "a box must not be a copy"


@given(strided(), st.data())
def test_any_range_comes_back(tensor: torch.Tensor, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    memory = raw(tensor)[start * 4 : stop * 4]
    expected = tensor.flatten().tolist()
    expected[start:stop] = [-1 - value for value in expected[start:stop]]
    copy_into(tensor, start, stop, bytes(255 - byte for byte in memory))  # -1 - x is x with every bit flipped
    assert tensor.flatten().tolist() == expected


def captured(tensor: torch.Tensor) -> bytes:
    """The bytes of one tensor in a slot."""
    source = Source(
        TensorSpec(name="a", dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), group=(0,)), tensor, mutable=False
    )
    return bytes(shard_of([source], build_layout([source.spec], 0, 1))[: tensor.nbytes].tolist())


@pytest.mark.parametrize("name", sorted(ITEMSIZES))
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (4, 3), (70_001,)], ids=str)
def test_every_dtype_is_copied_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    tensor, other = filled(shape, dtype), torch.empty(shape, dtype=dtype)
    assert tensor.itemsize == ITEMSIZES[name]
    memory = captured(tensor)
    assert memory == raw(tensor)
    copy_into(other, 0, other.numel(), memory)
    assert raw(other) == raw(tensor)


@given(strided())
def test_any_strides_are_laid_down_in_logical_order(tensor: torch.Tensor) -> None:
    assert captured(tensor) == raw(tensor)


def test_bytes_may_come_from_any_memory() -> None:
    source = filled((6,), torch.int16)
    with mmap.mmap(-1, 4096) as pages:
        pages[64:76] = raw(source)
        for memory in (raw(source), bytearray(raw(source)), memoryview(pages)[64:76], as_bytes(raw(source))):
            target = torch.zeros(6, dtype=torch.int16)
            copy_into(target, 0, 6, memory)
            assert torch.equal(target, source)


def test_bytes_that_begin_in_the_middle_of_an_element_are_still_right() -> None:
    source = filled((4,), torch.float64)
    target = torch.empty_strided((2, 2), (1, 2), dtype=torch.float64)
    copy_into(target, 0, 4, as_bytes(b"123" + raw(source))[3:])
    assert raw(target) == raw(source)


def test_an_expanded_tensor_can_be_written_back() -> None:
    tensor = torch.zeros(3, 1, dtype=torch.int32).expand(3, 4)
    copy_into(tensor, 2, 12, raw(torch.tensor([1, 1, 2, 2, 2, 2, 3, 3, 3, 3], dtype=torch.int32)))
    assert tensor.tolist() == [[1] * 4, [2] * 4, [3] * 4]


@pytest.mark.parametrize("size", [2, 20_000])
@pytest.mark.parametrize("view", [torch.Tensor.conj, torch._neg_view])
def test_lazy_views_give_their_values(size: int, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.complex(torch.arange(float(size)), torch.ones(size)))
    assert captured(tensor) == raw(tensor.resolve_conj().resolve_neg())


def test_gradients_are_neither_needed_nor_made() -> None:
    param = torch.nn.Parameter(torch.zeros(4))
    version = param._version
    copy_into(param.detach(), 0, 4, raw(torch.ones(4)))
    assert param.tolist() == [1, 1, 1, 1]
    assert param.grad_fn is None
    assert param._version == version + 1, "a write must show in the version counter"


def sources_of(world: int) -> list[Source]:
    tensors = {
        "flat": filled((7, 3), torch.bfloat16),
        "image": filled((2, 3, 4, 5)).to(memory_format=torch.channels_last),
        "matrix": filled((5, 4), torch.int64).t(),
        "scalar": filled((), torch.float64),
        "empty": filled((0, 2)),
        "flag": filled((3,), torch.bool),
    }
    everyone = tuple(range(world))
    return [
        Source(
            TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), group=everyone),
            tensor,
            mutable=name == "flag",
        )
        for name, tensor in tensors.items()
    ]


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("limit", [None, 1, 24])
def test_planned_copies_fill_the_shards_of_all_owners(world: int, limit: int | None) -> None:
    sources = sources_of(world)
    gathered = {source.spec.name: bytearray(source.spec.nbytes) for source in sources}
    sizes = {source.spec.name: source.tensor.itemsize for source in sources}
    for rank in range(world):
        layout = build_layout([source.spec for source in sources], rank, world)
        slot = shard_of(sources, layout, limit or 8 * 2**20)
        copies = plan_copies(sources, layout, limit)
        assert [copy.offset for copy in copies] == sorted(copy.offset for copy in copies)
        assert all(0 < copy.nbytes <= max(limit or 1000, sizes[copy.name]) for copy in copies)
        assert {copy.name for copy in copies if copy.mutable} <= {"flag"}
        for piece in layout.pieces:
            first = piece.start * sizes[piece.name]
            gathered[piece.name][first : first + piece.nbytes] = bytes(slot[piece.offset : piece.offset + piece.nbytes].tolist())
    assert gathered == {source.spec.name: raw(source.tensor) for source in sources}


def test_planned_copies_follow_the_live_tensors() -> None:
    tensor = torch.zeros(4)
    sources = [Source(TensorSpec(name="a", dtype="float32", shape=(4,), group=(0,)), tensor, mutable=False)]
    layout = build_layout([sources[0].spec], 0, 1)
    copies = plan_copies(sources, layout)
    with slot_of(layout) as slot:
        plan = CopyPlan(sources, layout, 4096)
        for value in (1.0, 2.0):
            tensor.fill_(value)
            slot.write(0, plan.batches[0])
            assert slot.tensor[:16].view(torch.float32).tolist() == [value] * 4
    assert [copy.view.data_ptr() for copy in copies] == [tensor.data_ptr()]


def test_contiguous_tensors_are_one_flat_view() -> None:
    (copy,) = plan_copies(sources_of(1)[:1], build_layout([sources_of(1)[0].spec], 0, 1))
    assert (copy.view.shape, copy.view.dtype, copy.nbytes) == ((21,), torch.bfloat16, 42)


def test_nothing_to_copy_is_no_error() -> None:
    assert not shard_of([], build_layout([], 0, 1)).numel()


def test_a_layout_of_other_tensors_is_refused() -> None:
    layout = build_layout([source.spec for source in sources_of(1)], 0, 1)
    changed = [
        Source(TensorSpec(name="flat", dtype="bfloat16", shape=(21,), group=(0,)), filled((21,), torch.bfloat16), False),
        *sources_of(1)[1:],
    ]
    for sources in (changed, sources_of(1)[1:]):
        with pytest.raises(LayoutMismatchError, match=r"flat@0:21 is in the layout, but the live tensor is .*; build the layout anew"):
            plan_copies(sources, layout)
