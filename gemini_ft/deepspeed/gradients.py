"""A gradient pipeline inside a DeepSpeed engine, from the ``"gradient_pipeline"`` section of its configuration.

Only methods of the one engine and of its optimizer are replaced. Where gradients are averaged is DeepSpeed's own choice:

======================  ==================================================================  ===============================
stage 0, BF16_Optimizer  all together, when the last micro-batch's backward pass is over     the plan's groups travel
stages 1 and 2           bucket by bucket (``reduce_bucket_size``); at 2 every micro-batch  what a bucket has of each group
stage 3, experimental    the same; every rank computes whole averages and keeps its part    what a bucket has of each group
======================  ==================================================================  ===============================

With local steps no gradients are averaged: at stage 0 the engine's all-reduce is left out, and at stages 1 and 2 each rank has all masters,
as if it were the only one. What ranks average is how far their parameters, or these masters, have moved.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from gemini_ft.deepspeed.partitions import base_optimizer, divide_among, own_part, whole_masters
from gemini_ft.errors import ConfigError, StateError
from gemini_ft.pipeline.averager import own_group
from gemini_ft.pipeline.outer import BodyWithOuter, OuterSteps
from gemini_ft.pipeline.plan import NO_RULE, Tensor, assign, check_local, nothing, trained
from gemini_ft.pipeline.routes import Gradients
from gemini_ft.pipeline.rules import PLANNED, Rule, Rules, check_world, load_rules

_log = logging.getLogger("gemini_ft")
_PROFILE_STEPS = 5  # that are watched before a planned fusion is planned
_SCATTER = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
_LOAD = inspect.signature(deepspeed.DeepSpeedEngine.load_checkpoint)
_SKIPPED = (
    "DeepSpeed has skipped an update whose gradients are infinite or no numbers, on this rank alone, as ranks train alone with a rule with "
    "every: it would be a step behind the others, and so would its schedule. Resume from a snapshot, and lower the learning rate or clip"
)


class EngineGradients(BodyWithOuter):
    """The pipeline of one engine, ``engine.gradients``. Constructing it is collective.

    Args:
        engine: as ``deepspeed.initialize`` returned it, before its first step.
        pipeline: rules, or the YAML or JSON file that has them.

    Attributes:
        averager: averages; its ``step`` counts the engine's optimizer steps, those that a loss scaler skipped included.

    Raises:
        ConfigError: the rules are wrong, or do not fit the model; or the engine has a setting that they cannot be used with, by name.
    """

    def __init__(self, engine: Any, pipeline: Any) -> None:
        rules = load_rules(pipeline)
        _refuse(_unsupported_engine(engine))
        goal = "quality: loss may have ranks train alone, which DDP and plain loops can begin in between, and no engine: leave it out"
        _refuse((rule.quality == "loss", f"{rule}: {goal}, or give every") for rule in rules)
        tensors = assign(engine.module, rules)
        local = [tensor for tensor in tensors if tensor.rule != NO_RULE and rules[tensor.rule].is_local]
        if local:
            check_local(rules, tensors, getattr(engine, "torch_autocast_z0_gradscaler", None))
            _refuse(_unsupported_alone(engine, rules[local[0].rule]))
        _refuse(_complex(engine.module))
        self._is_whole = not isinstance(engine.optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3)
        if not (self._is_whole or local):
            _refuse(_unsupported_buckets(engine, rules))
        if not self._is_whole or isinstance(engine.optimizer, BF16_Optimizer):
            _refuse(_sparse_tensors(tensors))
        self._engine = engine
        parameters = {name: param for name, param in trained(engine.module).items() if getattr(param, "ds_numel", param.numel())}
        ranks = dist.get_process_group_ranks(engine.seq_data_parallel_group)
        check_world(rules, len(ranks))
        group = own_group(ranks, engine.seq_data_parallel_group) if len(ranks) > 1 else None
        control = own_group(ranks, engine.seq_data_parallel_group, "gloo") if len(ranks) > 1 else None
        super().__init__(
            engine.module,
            parameters,
            [] if local else tensors,
            rules,
            group=group,
            control=control,
            device=engine.device,
            profile_steps=_PROFILE_STEPS,
        )
        if local:
            self._outer = self._outer_steps(local)
            self.groups += self._outer.groups
        self.averager.scale = self._loss_scale
        self._replaced: list[tuple[Any, str]] = []
        self._install()
        if self.averager.rank == 0:
            self._tell(rules)

    def _outer_steps(self, tensors: Sequence[Tensor]) -> OuterSteps:
        """The outer steps of parameters, or of their masters, which are whole on each rank from now on."""
        engine, rules, parameters = self._engine, self.averager.rules, self._parameters
        group, control = self.averager.group, self._control  # which have nothing else to carry
        if not self._is_whole:
            alone = own_group([dist.get_rank()], engine.seq_data_parallel_group)
            self.groups.append(alone)
            divide_among(engine, alone)
            parameters = whole_masters(engine)
            tensors = [tensor for tensor in tensors if tensor.name in parameters]
        return OuterSteps(engine.module, parameters, tensors, rules, group=group, control=control, device=engine.device)

    # -- where gradients are averaged

    def _install(self) -> None:
        engine, optimizer = self._engine, self._engine.optimizer
        match optimizer:
            case DeepSpeedZeroOptimizer() if self._outer is not None:
                for name, refusal in _refusals(engine).items():
                    vars(engine)[name] = refusal  # for good: the masters stay as they are divided
            case DeepSpeedZeroOptimizer_Stage3():
                self._replace(optimizer, _SCATTER, self._scatter)
            case DeepSpeedZeroOptimizer():
                optimizer.reduce_scatter = False  # read at every bucket: it decides whether the method below is asked
                self._replace(optimizer, "gradient_reduction_w_predivide", self._reduce_bucket)
            case _:
                self._replace(engine, "buffered_allreduce_fallback", self._reduce_all)
        self._replace(engine, "_take_model_step", self._take_model_step)
        self._replace(engine, "destroy", self._destroy)

    def _replace(self, target: Any, name: str, method: Callable[..., Any]) -> None:
        assert callable(getattr(target, name))
        vars(target)[name] = method  # past nn.Module's own __setattr__
        self._replaced.append((target, name))

    def _reduce_all(self, grads: Any = None, elements_per_buffer: int = 500_000_000) -> None:
        """Replaces ``DeepSpeedEngine.buffered_allreduce_fallback``: averages all gradients in the plan's groups."""
        engine = self._engine
        if grads is not None:
            type(engine).buffered_allreduce_fallback(engine, grads, elements_per_buffer)
            return
        if self._outer is not None:
            return
        gradients, dtype = self._accumulated(), engine.communication_data_type
        for name in gradients:
            self._ready_times.ready(name)
        means = self._average({name: gradient.to(dtype) for name, gradient in gradients.items()})
        for name, gradient in gradients.items():
            if gradient.is_sparse:
                self._parameters[name].grad = means[name].to(gradient.dtype)
            else:
                gradient.copy_(means[name])

    def _accumulated(self) -> dict[str, torch.Tensor]:
        """The gradients that averages replace, by the same names on all ranks."""
        optimizer = self._engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            params = [param for group in optimizer.bf16_groups for param in group]
            views = [view for group in optimizer.fp32_groups_gradients for view in group]
            return {self._names[id(param)]: view.view(param.shape) for param, view in zip(params, views, strict=True)}
        found = {}
        for name, param in self._parameters.items():
            if param.grad is None:
                param.grad = nothing(param, name in self._sparse)
            found[name] = param.grad
        return found

    def _reduce_bucket(self, tensor: torch.Tensor, communication_data_type: torch.dtype) -> torch.Tensor:
        """Replaces ``DeepSpeedZeroOptimizer.gradient_reduction_w_predivide``: averages one bucket, (elements,), in place."""
        if not tensor.numel():
            return tensor
        optimizer = self._engine.optimizer
        flat = tensor.to(communication_data_type)
        params = [optimizer.bit16_groups[group][index] for group, index, _ in optimizer.ipg_buckets[communication_data_type].params]
        parts = flat.split_with_sizes([param.numel() for param in params])
        gradients = {self._names[id(param)]: part.view(param.shape) for param, part in zip(params, parts, strict=True)}
        for name, mean in self._average(gradients).items():
            gradients[name].copy_(mean)
        if flat is not tensor:
            tensor.copy_(flat)
        return flat

    def _scatter(self, params: Sequence[Any], communication_data_type: torch.dtype) -> list[torch.Tensor]:
        """Replaces ZeRO 3's ``__avg_scatter_grads``: this rank's part of each average, (up to ``partition_numel``,)."""
        optimizer = self._engine.optimizer
        gradients = {self._names[id(param)]: param.grad.to(communication_data_type).view(param.ds_shape) for param in params}
        means = self._average(gradients)
        found = []
        for param in params:
            start, stop = own_part(param, self.averager.group)
            found.append(means[self._names[id(param)]].flatten()[start:stop].to(optimizer.gradient_accumulation_dtype))
        return found

    def _average(self, gradients: Gradients) -> dict[str, torch.Tensor]:
        with self._telling():
            return self.averager.average(gradients)

    def _loss_scale(self) -> float:
        """The factor of the gradients, as the engine's scaler has it now."""
        engine, optimizer = self._engine, self._engine.optimizer
        for scaler in (getattr(optimizer, "torch_autocast_gradscaler", None), getattr(engine, "torch_autocast_z0_gradscaler", None)):
            if scaler is not None:
                return float(scaler.get_scale())
        config = getattr(optimizer, "loss_scale_config", None)  # of stage 0; it may be there without being used
        scale = getattr(optimizer, "loss_scale", 1.0) if config is None else config.cur_scale
        return float(scale)

    # -- the engine's life

    def _take_model_step(self, *arguments: Any, **named: Any) -> Any:
        engine = self._engine
        if self._outer is not None:
            self._outer.catch_up()
            self._outer.stepped()
        result = type(engine)._take_model_step(engine, *arguments, **named)
        if self._outer is None:
            self.step_over()
        elif not engine.was_step_applied():
            raise self._outer.averager.failed(StateError(_SKIPPED))
        elif not self._is_whole and self._outer.updated():
            engine.optimizer.update_lp_params()
        return result

    def _destroy(self) -> Any:
        if sys.exc_info()[0] is None and not sys.is_finalizing():  # else threads may wait for a peer that has gone, or be gone
            self.close()
        return type(self._engine).destroy(self._engine)

    def close(self) -> None:
        """Gives the engine its own methods back, and ends the threads."""
        for target, name in self._replaced:
            vars(target).pop(name, None)
        super().close()

    def _tell(self, rules: Rules) -> None:
        stage = self._engine.zero_optimization_stage()
        if stage == 3:
            _log.warning("gradient_pipeline at ZeRO stage 3 is experimental: every rank computes whole averages, and keeps its part")
        if self._is_whole or stage == 1 or self._outer is not None:
            return
        for number, rule in enumerate(rules):
            if rule.compress is not None and rule.compress.make().state_dict():
                nbytes = sum(4 * tensor.nbytes // tensor.itemsize for tensor in self.averager.tensors if tensor.rule == number)
                _log.warning(
                    "gradient_pipeline: rule %d (%s) keeps a memory of the whole gradients on every rank, %s bytes for each of its kinds, "
                    "which ZeRO stage %d was to divide; feedback: 0, or an unbiased method (qsgd, int8), keeps none",
                    number + 1,
                    rule,
                    f"{nbytes:,}",
                    stage,
                )


def install(engine: Any, pipeline: Any) -> EngineGradients:
    """Gives an engine a gradient pipeline, unless it has one; returns it. Collective. Raises ConfigError: see `EngineGradients`."""
    if "gradients" not in vars(engine):
        vars(engine)["gradients"] = EngineGradients(engine, pipeline)
    found: EngineGradients = vars(engine)["gradients"]
    return found


def _refuse(reasons: Iterator[tuple[bool, str]]) -> None:
    if why := next((why for is_so, why in reasons if is_so), None):
        raise ConfigError(f"gradient_pipeline: {why}")


def _unsupported_engine(engine: Any) -> Iterator[tuple[bool, str]]:
    """The reason why the pipeline cannot be used with an engine, or None."""
    yield (isinstance(engine, deepspeed.PipelineEngine), "a PipelineEngine averages gradients in its own way; leave the section out")
    plain = deepspeed.DeepSpeedEngine in (type(engine), *type(engine).__bases__)
    yield not plain, f"a {type(engine).__name__} is not known; supported: DeepSpeedEngine"
    nobody = engine.optimizer is None or isinstance(engine.optimizer, DummyOptim)
    yield nobody, "this engine has no optimizer, so it averages no gradients; give one to deepspeed.initialize"
    yield bool(engine.has_moe_layers), "mixtures of experts (MoE) average experts over groups of their own; leave the section out"
    parallel = engine.dp_world_size != dist.get_world_size()
    yield parallel, "model, tensor and sequence parallelism are not supported: all ranks must be data parallel"
    yield not engine.gradient_average, 'gradient_allreduce_op must be "mean" or left out: rules average'
    yield bool(engine.is_deepcompile_enabled()), "compile.deepcompile builds the reduction into the graph; switch it off"
    for name, value in (("zenflow", engine.zenflow_config()), ("offload_optimizer.super_offload", engine.super_offload())):
        yield bool(value), f"zero_optimization.{name} reduces gradients in its own way; switch it off"


def _unsupported_alone(engine: Any, rule: Rule) -> Iterator[tuple[bool, str]]:
    """The reason why ranks cannot train alone in an engine, or None."""
    yield rule.within is not None, f"{rule}: within: host is of DDP and plain loops: leave it out"
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        scales = engine.fp16_enabled() or getattr(engine.optimizer, "torch_autocast_gradscaler", None) is not None
        yield scales, f"{rule}: a loss scaler skips updates on single ranks: take bf16, or leave every out"
        yield (
            engine.optimizer.cpu_offload,
            f"{rule}: masters in host memory (offload_optimizer) cannot be averaged: leave one of the two out",
        )
        yield (
            engine.global_steps > 0,
            f"{rule}: masters are divided anew, which no engine survives that has made steps: begin with the rules",
        )
        groups = len(base_optimizer(engine.optimizer).param_groups)  # of Adagrad, which DeepSpeed makes anew, there is one
        yield (
            groups != len(engine.optimizer.bit16_groups),
            f"{rule}: masters cannot be divided anew where DeepSpeed makes one parameter group of several, as it does for Adagrad: give "
            "the optimizer one group, or take another optimizer",
        )
        return
    yield (
        not isinstance(engine.optimizer, torch.optim.Optimizer),
        f"{rule}: ranks train alone at ZeRO stages 1 and 2, and at stage 0 in float32; this engine has a "
        f"{type(engine.optimizer).__name__}: leave every out, or use one of these",
    )
    clips = "gradient_clipping has DeepSpeed add up the norms of all ranks in each step, in which no rank may wait for another"
    yield engine.gradient_clipping() > 0, f"{rule}: {clips}: set gradient_clipping to 0"


def _unsupported_buckets(engine: Any, rules: Rules) -> Iterator[tuple[bool, str]]:
    """The reason why the pipeline cannot take buckets from DeepSpeed, or None."""
    zero, stage = engine.config.get("zero_optimization", {}), engine.zero_optimization_stage()
    planned = next(((number, rule) for number, rule in enumerate(rules) if rule.fusion in PLANNED), None)
    if planned is not None:
        number, rule = planned
        yield (
            True,
            f"rule {number + 1} ({rule}): fusion {rule.fusion} cannot be planned at ZeRO stage {stage}, where zero_optimization."
            "reduce_bucket_size decides what travels together; set that, and leave fusion out (or use stage 0)",
        )
    if stage == 3:
        whole = zero.get("reduce_scatter") is False
        yield whole, "zero_optimization.reduce_scatter must be true, or left out, at stage 3: the pipeline takes the place of it"
        quantized = bool(engine.zero_quantized_gradients())
        yield quantized, "zero_optimization.zero_quantized_gradients is a compression of its own; use one of the two"
        hpz = engine.zero_hpz_partition_size()
        yield hpz > 1, f"zero_optimization.zero_hpz_partition_size={hpz} is not supported; use 1"
        return
    scattered = zero.get("reduce_scatter") is True
    yield scattered, f"zero_optimization.reduce_scatter must be false, or left out, at stage {stage}: rules average whole buckets"
    loose = not engine.optimizer.contiguous_gradients
    yield loose, f"zero_optimization.contiguous_gradients must be true, or left out, at stage {stage}"


def _refusals(engine: Any) -> dict[str, Callable[..., Any]]:
    """Methods in place of those of an engine at ZeRO stage 1 or 2 whose ranks train alone, by name."""

    def save_checkpoint(*_: Any, **__: Any) -> NoReturn:
        raise StateError(
            "DeepSpeed's checkpoints are of one optimizer that all ranks share, and with a rule with every each rank has its own: "
            "save engine.module.state_dict() after an average. Lightning's Trainer does without with enable_checkpointing=False, "
            "transformers' with save_strategy='no'. The snapshots of gemini-ft have each rank's own state"
        )

    def load_checkpoint(*arguments: Any, **named: Any) -> Any:
        given = _LOAD.bind(engine, *arguments, **named).arguments
        is_whole = given.get("load_optimizer_states", True) and not given.get("load_module_only", False)
        if is_whole and not engine.load_universal_checkpoint():
            raise StateError(
                "DeepSpeed's checkpoints have each rank's part of one optimizer that all ranks share, and with a rule with every each rank "
                "has a whole one: load the weights alone (load_optimizer_states=False), or a universal checkpoint"
            )
        return type(engine).load_checkpoint(engine, *arguments, **named)

    def offload_states(*_: Any, **__: Any) -> NoReturn:
        raise StateError("offload_states moves the masters that a rule with every averages: leave one of the two out")

    return {each.__name__: each for each in (save_checkpoint, load_checkpoint, offload_states)}


def _complex(module: Any) -> Iterator[tuple[bool, str]]:
    for name, param in trained(module).items():
        yield (
            param.is_complex(),
            f"{name} is {param.dtype}, and DeepSpeed casts gradients to the real numbers of communication_data_type; keep real and "
            "imaginary parts in a real parameter (torch.view_as_real), or use DDP",
        )


def _sparse_tensors(tensors: Sequence[Tensor]) -> Iterator[tuple[bool, str]]:
    for tensor in tensors:
        yield (
            tensor.sparse,
            f"the gradient of {tensor.name} is a sparse tensor (its module has sparse=True), which ZeRO cannot partition; use stage 0, "
            "or leave sparse=True out: sync: zen takes dense-stored gradients row by row",
        )
