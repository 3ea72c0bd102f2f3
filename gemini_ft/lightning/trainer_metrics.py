"""The values that a Trainer has logged, and the torchmetrics of its module, callbacks and datamodule."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from gemini_ft.errors import ConfigError
from gemini_ft.lightning.trainer_callbacks import modules_beside


def logging_state(trainer: Any, metrics: Mapping[int, str]) -> dict[str, Any]:
    """The values that ``self.log`` has gathered since the epoch began, and those that were logged last.

    ``metrics``: id -> name of the module's torchmetrics; logged ones are stored as names.
    """
    connector = trainer._logger_connector
    return {
        "results": {key: _result_state(item, metrics) for key, item in trainer.fit_loop.epoch_loop._results.items()},
        "first_iteration": connector._first_loop_iter,
        "current_hook": connector._current_fx,
        "callback_metrics": dict(connector._callback_metrics),
        "logged_metrics": dict(connector._logged_metrics),
        "progress_bar_metrics": dict(connector._progress_bar_metrics),
    }


def set_logging_state(trainer: Any, package: str, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Puts back the result of :func:`logging_state`. ``metrics``: name -> torchmetrics of the module."""
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    module = importlib.import_module(f"{package}.trainer.connectors.logger_connector.result")
    results.clear()
    for key, saved in state["results"].items():
        results[key] = _make_result(module, trainer.strategy, saved, metrics)
    connector._first_loop_iter, connector._current_fx = state["first_iteration"], state["current_hook"]
    device = trainer.strategy.root_device
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        getattr(connector, f"_{name}").update({key: _to(value, device) for key, value in state[name].items()})


_META = [
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
]


def _result_state(item: Any, metrics: Mapping[int, str]) -> dict[str, Any]:
    sync = item.meta.sync
    if sync._group is not None:
        raise ConfigError(
            f"self.log({item.meta.name!r}, sync_dist_group=...): values reduced over a group of their own cannot be resumed; "
            "leave the group out, or reduce the value yourself before logging it"
        )
    return {
        "meta": {name: getattr(item.meta, name) for name in _META},
        "reduce": (item.meta.reduce_fx.__name__, item.meta.reduce_fx in (sum, min, max)),
        "sync": (sync._should, sync.rank_zero_only, sync._op, sync.fn is not type(sync).no_op),
        "is_tensor": item.is_tensor,
        "value": item.value if item.is_tensor else metrics[id(item.value)],
        "batches": getattr(item, "cumulated_batch_size", None),
        "has_reset": item.has_reset,
        "cache": _metric_caches(item),
    }


def _make_result(module: Any, strategy: Any, saved: Mapping[str, Any], metrics: Mapping[str, Any]) -> Any:
    name, is_python = saved["reduce"]
    reduce_fx = {"sum": sum, "min": min, "max": max}[name] if is_python else getattr(torch, name)
    should, rank_zero_only, op, over_ranks = saved["sync"]
    meta = module._Metadata(**saved["meta"], reduce_fx=reduce_fx)
    fn = strategy.reduce if over_ranks else module._Sync.no_op
    meta.sync = module._Sync(fn=fn, _should=should, rank_zero_only=rank_zero_only, _op=op)
    item = module._ResultMetric(meta, saved["is_tensor"])
    item.value = saved["value"] if saved["is_tensor"] else metrics[saved["value"]]
    if saved["batches"] is not None:
        item.cumulated_batch_size = saved["batches"]
    item.has_reset = saved["has_reset"]
    _set_metric_caches(item, saved["cache"])
    return item.to(strategy.root_device)


def metrics_of(trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The torchmetrics and their collections among the submodules, and of callbacks and datamodule, by name."""
    from torchmetrics import Metric, MetricCollection  # Lightning depends on it

    modules = modules_beside(trainer) | dict(trainer.lightning_module.named_modules())
    metrics = {name: item for name, item in modules.items() if isinstance(item, Metric)}
    return metrics, {name: item for name, item in modules.items() if isinstance(item, MetricCollection)}


def metric_state(metric: Any) -> dict[str, Any]:
    """All that one torchmetrics.Metric has accumulated. Its tensors are live."""
    return {"state": dict(metric.metric_state), "cache": _metric_caches(metric)}


def set_metric_state(metric: Any, state: Mapping[str, Any]) -> None:
    for name, value in state["state"].items():
        setattr(metric, name, _to(value, metric.device))
    _set_metric_caches(metric, {key: _to(value, metric.device) for key, value in state["cache"].items()})


def tracked(trainer: Any) -> dict[str, int]:
    """The number of times that each MetricTracker has begun anew; each time it grew by a copy of its metric."""
    from torchmetrics import MetricTracker

    modules = modules_beside(trainer) | dict(trainer.lightning_module.named_modules())
    return {name: len(part) for name, part in modules.items() if isinstance(part, MetricTracker)}


def track(trainer: Any, times: Mapping[str, int]) -> None:
    """Makes MetricTrackers have as many metrics as they had at :func:`tracked`."""
    parts = modules_beside(trainer) | dict(trainer.lightning_module.named_modules())
    for name, wanted in times.items():
        while name in parts and len(parts[name]) < wanted:
            parts[name].increment()


def metric_groups(collection: Any) -> dict[str, Any]:
    """The groups of metrics in a MetricCollection that share one state: only the first of each is updated."""
    return {"groups": dict(collection._groups), "checked": collection._groups_checked, "copied": collection._state_is_copy}


def set_metric_groups(collection: Any, state: Mapping[str, Any]) -> None:
    collection._groups, collection._groups_checked, collection._state_is_copy = dict(state["groups"]), state["checked"], state["copied"]


def _metric_caches(metric: Any) -> dict[str, Any]:
    return {"update_count": metric._update_count, "computed": metric._computed, "forward": metric._forward_cache}


def _set_metric_caches(metric: Any, caches: Mapping[str, Any]) -> None:
    metric._update_count, metric._computed, metric._forward_cache = caches["update_count"], caches["computed"], caches["forward"]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return value
