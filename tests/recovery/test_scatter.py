"""Bytes of a shard that are laid into live tensors, copied or received where they belong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft import accelerator
from gemini_ft.core.layout import ALIGNMENT, Read, TensorSpec, build_layout, plan_reads
from gemini_ft.recovery.restore import Scatter

TENSORS = {
    "weights": torch.arange(600, dtype=torch.float32).view(20, 30),
    "half": torch.arange(77).to(torch.bfloat16),
    "step": torch.tensor(7.0),
    "bytes": torch.arange(193).to(torch.uint8),
    "turned": torch.arange(96, dtype=torch.float64).view(8, 12),
}
SPECS = [
    TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), group=(0,))
    for name, tensor in TENSORS.items()
]
LAYOUT = build_layout(SPECS, 0, 1)
READS = plan_reads(SPECS, 0, {0: LAYOUT})


def shard() -> bytearray:
    """The shard of these tensors; padding has bytes of its own, which must end up nowhere."""
    content = bytearray(b"\xff" * LAYOUT.nbytes)
    for piece in LAYOUT.pieces:
        flat = TENSORS[piece.name].reshape(-1)[piece.start : piece.stop].contiguous()
        content[piece.offset : piece.offset + piece.nbytes] = bytes(flat.view(torch.uint8))
    return content


def live() -> dict[str, torch.Tensor]:
    """Tensors to fill, of which one is not contiguous."""
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    return found | {"turned": torch.zeros(12, 8, dtype=torch.float64).t(), "half": torch.nn.Parameter(found["half"])}


def fill(scatter: Scatter, content: bytes | bytearray, step: int) -> int:
    """Lays the shard into its tensors, chunk by chunk; returns how many were received in place."""
    in_place = 0
    for at in range(0, len(content), step):
        chunk = memoryview(content)[at : at + step]
        if places := scatter.live(at, len(chunk)):
            in_place += 1
            for place in places:
                place[:], chunk = chunk[: len(place)], chunk[len(place) :]
            assert not chunk
        else:
            scatter.put(at, chunk)
    return in_place


@given(st.integers(1, 40))
def test_what_is_received_in_place_is_what_would_have_been_copied(lines: int) -> None:
    content, tensors = shard(), live()
    scatter = Scatter(READS, tensors)
    in_place = fill(scatter, content, step := lines * ALIGNMENT)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    assert scatter.nbytes == sum(read.nbytes for read in READS)
    assert in_place or step > 600 * 4


def test_what_is_received_in_place_counts_as_a_write() -> None:
    tensors = live()
    before = tensors["weights"]._version
    assert Scatter([read for read in READS if read.name == "weights"], tensors).live(
        next(r.offset for r in READS if r.name == "weights"), 64
    )
    assert tensors["weights"]._version > before


def test_nothing_is_received_in_place_that_lies_elsewhere_or_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [read for read in READS if read.name == "weights"]
    at = weights[0].offset
    assert Scatter(weights, live()).live(at, 640)
    assert not Scatter(weights, live()).live(at + 2400 - 64, 64 + 4 * ALIGNMENT)  # of which a part belongs nowhere
    assert not Scatter([], {}).live(0, 640)
    turned = {**live(), "weights": torch.zeros(30, 20).t()}
    assert not Scatter(weights, turned).live(at, 640)
    monkeypatch.setattr(accelerator, "holds", lambda tensor: True)
    assert not Scatter(weights, live()).live(at, 640)


@pytest.mark.parametrize("step", [ALIGNMENT, 2 * ALIGNMENT, 4 * ALIGNMENT])
@pytest.mark.parametrize("is_received", [True, False], ids=["received", "copied"])
def test_one_place_of_a_shard_that_several_tensors_read(step: int, is_received: bool) -> None:
    """At the beginning of a chunk, and inside one."""
    whole = torch.arange(64, dtype=torch.float32)
    content = bytearray(whole.numpy().tobytes())
    places = {"whole": (0, 64), "rows": (0, 24), "first": (32, 33), "second": (32, 33), "third": (32, 33)}
    reads = [
        Read(owner=0, offset=4 * start, nbytes=4 * (stop - start), name=name, start=0, stop=stop - start)
        for name, (start, stop) in places.items()
    ]
    for some in (reads, reads[2:]):
        tensors = {read.name: torch.zeros(read.stop) for read in some}
        scatter = Scatter(some, tensors)
        if is_received:
            fill(scatter, content, step)
        else:
            for at in range(0, len(content), step):
                scatter.put(at, memoryview(content)[at : at + step])
        assert all(torch.equal(tensor, whole[slice(*places[name])]) for name, tensor in tensors.items())


def test_memory_is_not_asked_for_where_a_chunk_is_copied_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemini_ft.recovery.restore.memory_of", lambda *_: pytest.fail("asked for"))
    scalar = next(read for read in READS if read.name == "step")
    many = [Read(owner=0, offset=i * ALIGNMENT, nbytes=scalar.nbytes, name=f"{i}", start=0, stop=1) for i in range(257)]
    assert not Scatter(many, {read.name: torch.zeros(()) for read in many}).live(0, 257 * ALIGNMENT)
    assert not Scatter(many[:1], {"0": torch.zeros(())}).live(0, 3 * ALIGNMENT)


def test_pieces_without_padding_between_them_are_received_without() -> None:
    tight = [
        Read(owner=0, offset=0, nbytes=64, name="a", start=0, stop=16),
        Read(owner=0, offset=64, nbytes=64, name="b", start=0, stop=16),
    ]
    assert [len(place) for place in Scatter(tight, {"a": torch.zeros(16), "b": torch.zeros(16)}).live(0, 128)] == [64, 64]
