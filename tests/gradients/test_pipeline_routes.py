"""What routes and threads keep, and for how long; on one rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini_ft.compression.base import Bundle, Turn
from gemini_ft.compression.dgc import SampledThreshold
from gemini_ft.compression.methods import create
from gemini_ft.compression.sparse import entries
from gemini_ft.errors import ConfigError, StateError
from gemini_ft.pipeline import GradientSynchronizer
from gemini_ft.pipeline.lanes import GroupInFlight
from gemini_ft.pipeline.plan import Group, trained
from gemini_ft.pipeline.route_table import Routes
from gemini_ft.pipeline.routes import Compressed, Plain, Sparse
from gemini_ft.pipeline.rules import load_rules
from gemini_ft.sync.auto import Auto
from gemini_ft.sync.zen import Zen


def averaged(route: Any, gradients: Mapping[str, Tensor], step: int = 0) -> dict[str, Tensor]:
    found: list[dict[str, Tensor]] = []
    job = GroupInFlight(
        route.average(gradients, Turn(step=step), None, 1.0), False, lambda means: found.append({k: v.clone() for k, v in means.items()})
    )
    over = job.step(None)
    while not over:
        call = job.asked.get()
        assert call is not None
        over = job.step(call.run())
    return found[0]


class TestPlain:
    def test_buffers_of_groups_that_come_no_more_are_given_up(self) -> None:
        route = Plain()
        for step in range(50):
            averaged(route, {f"{step}": torch.ones(8)}, step)
        assert len(route.buffers) <= 2

    def test_a_buffer_that_is_used_in_every_step_stays(self) -> None:
        route = Plain()
        averaged(route, {"a": torch.ones(8)}, 0)
        before = route.buffers["a",][1][0].data_ptr()
        averaged(route, {"a": torch.ones(8)}, 1)
        assert route.buffers["a",][1][0].data_ptr() == before

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_shapes_dtypes_and_strides(self, dtype: torch.dtype | None) -> None:
        gradients = {
            "matrix": torch.arange(12.0).view(3, 4).t(),
            "scalar": torch.tensor(3.0),
            "half": torch.ones(5, dtype=torch.float16),
            "images": torch.arange(32.0).view(1, 2, 4, 4).to(memory_format=torch.channels_last),
        }
        means = averaged(Plain(dtype), gradients)
        for name, gradient in gradients.items():
            assert torch.equal(means[name].float(), gradient.float())


@pytest.mark.parametrize(
    ("rule", "itemsize"),
    [
        ({}, 4),
        ({"compress": "bf16"}, 2),
        ({"compress": {"method": "fp16", "feedback": 0}}, 2),
        ({"compress": {"method": "bf16", "feedback": 1}}, None),
        ({"compress": "none"}, None),
    ],
)
def test_a_cast_is_one_all_reduce_of_the_backend(rule: dict[str, Any], itemsize: int | None) -> None:
    """Where nothing is kept, with no thread of ours between gradients and network."""
    routes = Routes(load_rules([{"params": "*", **rule}]), None)
    group = Group(0, ("a", "b"))
    route = routes.of(group)
    assert isinstance(route, Plain) == routes.all_plain([group]) == (itemsize is not None)
    if itemsize is not None:
        call = next(route.average({"a": torch.ones(30), "b": torch.ones(12)}, Turn(step=0, rank=0, world=2), None, 1.0))
        assert call.nbytes == 42 * itemsize
        assert call.begin is not None


def test_sparse_and_complex_gradients_keep_their_dtype_where_they_travel_in_16_bits() -> None:
    """As in plans of ``auto``, for sparse gradients of which nothing was known beforehand."""
    gradients = {"a": torch.ones(3).to_sparse(), "b": torch.full((3,), 1 + 2j), "c": torch.full((3,), 1 + 2j).to_sparse()}
    means = averaged(Plain(torch.bfloat16), gradients)
    for name, gradient in gradients.items():
        assert (means[name].dtype, means[name].layout) == (gradient.dtype, gradient.layout)
        assert torch.equal(means[name].to_dense(), gradient.to_dense())


def test_a_cast_refuses_sparse_tensors() -> None:
    route = Routes(load_rules([{"params": "*", "compress": "bf16"}]), None).fresh(0, "rule")
    with pytest.raises(ConfigError, match="the gradient of a is a sparse tensor, which cannot be compressed; give the parameter a rule"):
        averaged(route, {"a": torch.ones(3).to_sparse()})


def test_averages_are_not_kept_after_they_were_taken() -> None:
    means: dict[str, Tensor] = {}
    job = GroupInFlight(Plain().average({"a": torch.ones(3)}, Turn(), None, 1.0), False, means.update)
    assert job.step(None)
    kept = weakref.ref(means["a"])
    means.clear()
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("shape", [(), (4,), (4, 3), (4, 3, 2)])
def test_dense_stored_gradients_keep_their_shape(shape: tuple[int, ...]) -> None:
    gradient = torch.ones(shape)
    assert torch.equal(averaged(Sparse(Zen), {"a": gradient})["a"], gradient)


@pytest.mark.parametrize(("sync", "adapts"), [("zen", False), ({"scheme": "hierarchical", "local_size": 1}, False), ("auto", True)])
@pytest.mark.parametrize("compress", [{}, {"compress": "topk"}])
def test_only_schemes_that_adapt_themselves_are_one_for_each_gradient(sync: Any, adapts: bool, compress: dict[str, str]) -> None:
    """Of others there is one for all that is ever tried: a hierarchical one has process groups."""
    routes = Routes(load_rules([{"params": "*", "sync": sync, **compress}]), None)
    gradients, schemes = {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, []
    for route in (routes.fresh(0, "rule"), routes.fresh(0, "rule")):
        averaged(route, gradients)
        schemes += [route.scheme] if isinstance(route, Compressed) else list(route.schemes.values())
    tried = 2 * (1 if compress else len(gradients))
    assert len({id(scheme) for scheme in schemes}) == (tried if adapts else 1)


def test_what_a_scheme_has_chosen_is_part_of_a_compressions_state() -> None:
    route = Compressed(create("topk", ratio=0.5), Auto())
    averaged(route, {"a": torch.arange(8.0)})
    state = route.state_dict()
    assert set(state) == {"reducer", "scheme"}
    other = Compressed(create("topk", ratio=0.5), Auto())
    other.load_state_dict(state)
    assert torch.equal(averaged(other, {"a": torch.zeros(8)}, 1)["a"], averaged(route, {"a": torch.zeros(8)}, 1)["a"])


def test_schedules_follow_updates_and_not_synchronisations() -> None:
    method = SampledThreshold(ratio=0.01, warmup_steps=100)
    bundle = Bundle.of({"a": torch.randn(5000, generator=torch.Generator().manual_seed(0))})

    def picked(turn: Turn) -> int:
        return len(entries(method.compress(bundle, turn))[1])

    assert picked(Turn(step=500, update=0)) == picked(Turn(step=0)) > 4 * picked(Turn(step=500))


class TestSynchronizer:
    def test_a_closed_one_says_so(self) -> None:
        model = nn.Linear(2, 2)
        synchronizer = GradientSynchronizer(model, [{"params": "*", "compress": "topk"}])
        synchronizer.close()
        model(torch.ones(1, 2)).sum().backward()  # its hooks are gone
        with pytest.raises(StateError, match="has been closed"):
            synchronizer.averager.ready("weight", torch.ones(2, 2), lambda mean: None)

    def test_a_rule_for_no_tensor_plans_nothing(self) -> None:
        rules = [{"params": "*weight"}, {"params": "*bias"}, {"params": "*", "fusion": "auto"}]
        model = nn.Linear(2, 2)
        synchronizer = GradientSynchronizer(model, rules, profile_steps=2)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            synchronizer.synchronize()
        assert synchronizer.settled
        synchronizer.close()

    def test_a_backward_pass_in_no_sync_after_the_last_one(self) -> None:
        model = nn.Linear(2, 2)
        synchronizer = GradientSynchronizer(model)
        model(torch.ones(1, 2)).sum().backward()
        with synchronizer.no_sync(), pytest.raises(StateError, match="while it is averaged"):
            model(torch.ones(1, 2)).sum().backward()
        synchronizer.close()

    def test_a_state_of_other_options_is_refused(self) -> None:
        one = GradientSynchronizer(nn.Linear(2, 2), [{"params": "*", "compress": {"method": "topk", "ratio": 0.5}}])
        other = GradientSynchronizer(nn.Linear(2, 2), [{"params": "*", "compress": {"method": "topk", "ratio": 0.25}}])
        with pytest.raises(StateError, match="other rules"):
            other.load_state_dict(one.state_dict())
        one.close()
        other.close()

    def test_a_state_goes_on_with_another_switch(self) -> None:
        """A switch that has moved, or is given more time, is no reason to lose a run; how it adds up is."""

        def made(**options: object) -> GradientSynchronizer:
            return GradientSynchronizer(nn.Linear(2, 2), [{"params": "*", "sync": {"scheme": "fpisa", **options}}])

        synchronizers = one, moved, other = made(switch="a:1"), made(switch="b:2", patience=9.0), made(switch="a:1", mode="fpisa-a")
        moved.load_state_dict(one.state_dict())
        with pytest.raises(StateError, match="other rules"):
            other.load_state_dict(one.state_dict())
        for each in synchronizers:
            each.close()

    def test_memories_of_ways_that_were_given_up_go(self) -> None:
        synchronizer = GradientSynchronizer(nn.Linear(4, 4), [{"params": "*", "compress": "topk"}])
        averager = synchronizer.averager
        averager.ready("bias", torch.ones(4), lambda mean: None)
        averager.ready("weight", torch.ones(4, 4), lambda mean: None)
        averager.wait()
        assert averager.routes.state_dict()
        averager.routes.keep([])
        assert not averager.routes.state_dict()
        synchronizer.close()


def test_parameters_that_ddp_ignores_are_not_waited_for() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.parameters_to_ignore = {"1.weight"}
    assert set(trained(model)) == {"0.weight", "0.bias", "1.bias"}
