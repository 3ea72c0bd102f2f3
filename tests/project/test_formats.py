"""What is kept or sent has a number, which is raised with its content: another version says so, in place of failing on what it finds."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import pkgutil
import re
import textwrap
import typing
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from gemini_ft.agent.memory import slot_memory
from gemini_ft.storage import checkpoints
from gemini_ft.wire import messages, peer_messages, worker_messages

# The functions whose dicts and tuples are the small state.
SMALL_STATE = [
    "checkpointer:Checkpointer.step",
    "deepspeed.protection:Protection.moment",
    "deepspeed.protection:Protection.save",
    "deepspeed.partitions:about",
    "deepspeed.reshard:Cut.pack",
    "deepspeed.state:EngineState.__init__",
    "deepspeed.state:EngineState.extras",
    "huggingface:_Protection.save",
    "loaders.between:Between.state",
    "loaders.bookmark:Bookmark.state_dict",
    "lightning.capture:capture",
    "lightning.fabric:GeminiFabricMixin._gemini_save",
    "lightning.deepspeed:EngineFit._extras",
    "lightning.fit:Fit._extras",
    "lightning.trainer_callbacks:averaging_state",
    "lightning.trainer_callbacks:tickets",
    "lightning.trainer_data:Loading._moment",
    "lightning.trainer_loggers:Logs._state_of",
    "lightning.trainer_loops:loop_extras",
    "lightning.trainer_metrics:_result_state",
    "lightning.trainer_metrics:logging_state",
    "lightning.trainer_metrics:metric_state",
    "state.base:PlainState.extras",
    "state.ddp:ddp_state",
    "state.logical:LogicalRanks.state_dict",
    "state.modes:Modes.collect",
    "state.modules:collect_extras",
    "state.pending:PendingGradients.collect",
    "worker.recorder:Recorder._submit",
    "worker.recorder:Recorder.record",
]
LAYOUT = "core.layout:Layout.to_bytes"


class Kept(NamedTuple):
    """A format number, and the content that it stands for."""

    number: int
    content: list[Any]  # types, and names of functions that write
    digest: str


KEPT = {
    "storage.checkpoints.FORMAT_VERSION": Kept(
        checkpoints.FORMAT_VERSION, [checkpoints.Manifest, checkpoints.Mark, LAYOUT, *SMALL_STATE], "32aa8504af69bdef"
    ),
    "agent.memory.slot_memory.FORMAT": Kept(
        slot_memory.FORMAT, ["agent.memory.slot_memory:SlotMemory._write_header", LAYOUT, *SMALL_STATE], "77d5f0662f58f84c"
    ),
    "wire.messages.PROTOCOL_VERSION": Kept(
        messages.PROTOCOL_VERSION,
        [peer_messages.Claims, peer_messages.PeerMessage, worker_messages.ToAgent, worker_messages.ToWorker],
        "79e10e5f628b8748",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_number_is_raised_with_what_it_stands_for(name: str) -> None:
    kept = KEPT[name]
    content = [_keys(each) if isinstance(each, str) else _shapes(each) for each in kept.content]
    digest = hashlib.sha256(json.dumps([kept.number, content], sort_keys=True).encode()).hexdigest()[:16]
    assert digest == kept.digest, (
        f"{name} = {kept.number} stands for something else now. Raise it, unless what has been kept before can still be read, with a test "
        f"that does; then write {digest!r} here. The content: {json.dumps(content)}"
    )


def _keys(name: str) -> list[str]:
    """The keys of the dicts that a function writes; where it writes none, its tuples. Its module may change."""
    nodes = [*ast.walk(ast.parse(textwrap.dedent(inspect.getsource(pkgutil.resolve_name(f"gemini_ft.{name}")))))]
    keys = {key.value for node in nodes if isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)}
    keys |= {node.slice.value for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)}
    tuples = [ast.unparse(node) for node in nodes if isinstance(node, ast.Tuple)]
    return [name.rpartition(":")[2], *(sorted(map(str, keys)) or tuples)]


def _shapes(kind: Any) -> dict[str, Any]:
    """Every type that a value of this one leads to, by its name."""
    found: dict[str, Any] = {}
    _follow(kind, found)
    return found


def _follow(kind: Any, found: dict[str, Any]) -> None:
    for inner in typing.get_args(kind):
        _follow(inner, found)
    if not isinstance(kind, type) or kind.__qualname__ in found:
        return
    if issubclass(kind, BaseModel):
        fields = {name: field.annotation for name, field in kind.model_fields.items()}
    elif dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        fields = {name: given for name, given in typing.get_type_hints(kind).items() if not name.startswith("_")}
    else:
        return
    found[kind.__qualname__] = {name: re.sub(" at 0x[0-9a-f]+", "", str(given)) for name, given in fields.items()}
    for given in fields.values():
        _follow(given, found)
