"""Loaders of plain loops that go on, after a failure, with the batch that would have come next.

loader = gemini_ft.resumable(DataLoader(data, batch_size=8, shuffle=True))
with gemini_ft.Checkpointer(model, optimizer, state={"loader": loader}) as checkpointer:
    checkpointer.resume()
    for epoch in range(checkpointer.scalars.get("epoch", 0), epochs):
        for batch in loader:
            ...
            checkpointer.step(epoch=epoch)
"""

from __future__ import annotations

from typing import Any

from gemini_ft.loaders.ahead import ResumableAdapter, is_adapter, no_epoch
from gemini_ft.loaders.loader import make_resumable
from gemini_ft.loaders.parts import DataResume


def resumable(loader: Any, data_resume: DataResume = "auto") -> Any:
    """Gives a loader a state, for ``Checkpointer(state={"loader": loader})``, with which its next iteration goes on where it was.

    A DataLoader, torchdata's StatefulDataLoader too, stays the same object; a loader that `accelerate` has prepared is wrapped, and goes on
    as its DataLoader does, though it has fetched a batch ahead; any other iterable of batches is wrapped, and gets back to
    its position by loading the batches of the epoch again. Numbers that an iteration draws when it begins, such as the seed of the
    workers and the order of the samples, are those that were drawn then, and the process's generators stay as `resume` has left them.

    A loop that numbers its batches gives ``enumerate(loader, loader.batches_done)``, by the batches that an iteration after a failure
    leaves out.

    A loader of validations, beside that of the training, begins anew where its iteration was over, left early or not. So do all loaders of
    a loop that calls `step` once after each epoch; it gives the next one's number, ``step(epoch=epoch + 1)``. A snapshot of the last batch,
    of a loop that calls `step` in its iterations, goes on at that end: the first iteration has no batches.

    Args:
        loader: DataLoader, or any iterable of batches.
        data_resume: "skip" or "replay" where both are possible; "auto" takes "skip" where it is known to be exact (docs/lightning.md).
    """
    return ResumableAdapter(loader, data_resume) if is_adapter(loader) else make_resumable(loader, data_resume, epoch=no_epoch)
