"""``gemini export``: write one checkpoint for other tools."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence

from gemini_ft.config import load_config
from gemini_ft.errors import ConfigError
from gemini_ft.export.target import DCP, DEEPSPEED, Target, staged

FORMATS = ("lightning", "dcp", "safetensors", "deepspeed")
_DESCRIPTION = """Write one checkpoint so that tools without gemini-ft can open it.

It is read from the memory of this machine's agents, of a job that runs or that has crashed, or with --from from storage.
While a running job's memory is read, it may leave out a few snapshots, or wait for them where on_late is "wait".
  lightning    DIR/step-N.ckpt, for Trainer.fit(ckpt_path=...)
  dcp          DIR, for torch.distributed.checkpoint.load: {"model": ..., "optim": ...}
  safetensors  DIR/model.safetensors: the weights
  deepspeed    DIR, for engine.load_checkpoint, of a DeepSpeed engine and with as many ranks as it had"""


def command(arguments: Sequence[str]) -> int:
    """``gemini export STEP --to DIR --format FORMAT``; exit status.

    Raises GeminiError: there is no such checkpoint, it cannot be written in this format, or the target exists.
    """
    options = _parser().parse_args(arguments)
    from gemini_ft.export import formats, source, zero  # torch comes with them, and takes seconds that --help does without

    config = load_config()
    endpoint = options.endpoint_url or (config.storage.endpoint_url if config.storage is not None else None)
    wanted = _step(options.step), options.run_id, options.stream
    with contextlib.closing(source.find(*wanted, options.source, options.endpoint_url, options.trust_pickle)) as checkpoint:
        name = {"lightning": f"step-{checkpoint.step}.ckpt", "safetensors": "model.safetensors"}.get(options.format)
        target = {"dcp": DCP, "deepspeed": DEEPSPEED}.get(options.format, Target(name=name))
        with staged(options.to, target, options.overwrite, endpoint) as folder:
            with source.refusing_nonsense(checkpoint):
                write = {"dcp": formats.write_dcp, "lightning": formats.write_lightning, "safetensors": formats.write_safetensors}
                write.get(options.format, zero.write)(checkpoint, folder / (name or ""))
            nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    where = options.to if name is None else f"{options.to.rstrip('/')}/{name}"
    print(f"wrote step {checkpoint.step} of {checkpoint.run} ({checkpoint.stream}) from {checkpoint.where} to {where}: {nbytes:,} bytes")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gemini export", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", metavar="STEP", help="number of the step, or latest")
    parser.add_argument("--to", required=True, metavar="DIR|URL", help="local folder, file:///folder or s3://bucket/prefix")
    parser.add_argument("--format", required=True, choices=FORMATS, help="what to write")
    parser.add_argument(
        "--from", dest="source", metavar="URL", help="storage to read, as in storage.url (default: memory, then what is configured)"
    )
    parser.add_argument("--run-id", default=os.environ.get("GEMINI_RUN_ID"), help="which run (default: GEMINI_RUN_ID, or the only one)")
    parser.add_argument("--stream", help="which line of snapshots: main, fit-0, fabric-0, deepspeed-0 (default: the only one)")
    parser.add_argument("--endpoint-url", help="of an S3-compatible store (default: boto3's own choice)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    parser.add_argument("--trust-pickle", action="store_true", help="load pickles from storage that are not signed with the run's secret")
    return parser


def _step(text: str) -> int | None:
    if text == "latest":
        return None
    if not text.isdecimal():
        raise ConfigError(f"STEP={text!r}: must be the number of a step, or latest")
    return int(text)
