"""Copies of layers on the device: they arrive in time, and are never too many or outdated."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from spes_swarm.model.foreign.prefetch import Prefetcher, UseOrder

NUM_LAYERS = 4
Use = tuple[int, bool]  # number of the layer, and whether it is used in a backward pass


def new_layers(count: int = NUM_LAYERS) -> list[nn.Module]:
    return [nn.Identity() for _ in range(count)]


def step(checkpointing: bool, layers: int = NUM_LAYERS) -> list[Use]:
    """The uses of a forward and a backward pass; with checkpointing, each layer's forward pass is repeated."""
    backward = [(number, True) for number in reversed(range(layers)) for _ in range(1 + checkpointing)]
    return [(number, False) for number in range(layers)] + backward


def next_other(uses: list[Use], index: int) -> int | None:
    """The layer of the next use, if it is a different one."""
    rest = [use for use in uses[index:] if use != uses[index]]
    return rest[0][0] if rest and rest[0][0] != uses[index][0] else None


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_second_step_is_predicted_by_the_first(checkpointing: bool) -> None:
    layers, order = new_layers(), UseOrder()
    uses = 3 * step(checkpointing)
    expected = [next_other(uses, index) for index in range(len(uses))]
    found = [order.use(layers[number], in_backward) for number, in_backward in uses]
    one = len(uses) // 3
    numbers = [None if layer is None else layers.index(layer) for layer in found]
    assert numbers[one : 2 * one] == expected[one : 2 * one]
    assert set(numbers[: NUM_LAYERS - 1]) == {None}


def test_an_evaluation_costs_one_wrong_prediction() -> None:
    layers, order = new_layers(), UseOrder()
    evaluation = [(number, False) for number in range(NUM_LAYERS)]
    uses = 2 * step(False) + 2 * evaluation + 2 * step(False)
    expected = [next_other(uses, index) for index in range(len(uses))]
    wrong = 0
    for index, (number, in_backward) in enumerate(uses):
        found = order.use(layers[number], in_backward)
        if index >= 2 * 2 * NUM_LAYERS and found is not None:
            wrong += layers.index(found) != expected[index]
    # After the first evaluation a first layer comes where the backward pass came before; after the second, vice versa.
    assert wrong == 1


@dataclass
class Device:
    """The place of the copies; records how many exist at once."""

    alive: list[Copy] = field(default_factory=list)
    most: int = 0
    started: int = 0
    content: dict[nn.Module, int] = field(default_factory=dict)  # of the sources

    def start_copy(self, layer: nn.Module) -> Copy:
        copy = Copy(self, self.content.get(layer, 0))
        self.alive.append(copy)
        self.started += 1
        self.most = max(self.most, len(self.alive))
        return copy


@dataclass(eq=False)
class Copy:
    device: Device
    content: int
    is_finished: bool = False

    def ready(self) -> list[Tensor]:
        assert self in self.device.alive
        return [torch.tensor(self.content)]

    def drop(self) -> None:
        self.device.alive.remove(self)

    def finish(self) -> None:
        self.is_finished = True


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_layer_is_copied_before_it_is_needed(checkpointing: bool) -> None:
    layers, device = new_layers(), Device()
    prefetcher = Prefetcher(device.start_copy)
    for number, in_backward in step(checkpointing):
        prefetcher.fetch(layers[number], in_backward)
    for number, in_backward in 2 * step(checkpointing):
        late = device.started
        following = prefetcher.order.after(layers[number], in_backward)
        prefetcher.fetch(layers[number], in_backward)
        # What is started now is the next layer.
        assert device.started - late <= (following is not None)
    assert device.most == 2
    # Each pass copies every layer once, except those still there from the pass before.
    assert device.started <= 3 * (2 * NUM_LAYERS - 2) + 2


@given(
    st.lists(st.one_of(st.tuples(st.integers(0, 4), st.booleans()), st.none()), max_size=60),
)
def test_any_order_gets_the_right_layer_and_at_most_two_copies(uses: list[Use | None]) -> None:
    layers, device = new_layers(5), Device()
    prefetcher = Prefetcher(device.start_copy)
    device.content = dict(zip(layers, range(5), strict=True))
    for use in uses:
        if use is None:  # all sources change
            before = list(device.alive)
            prefetcher.forget()
            assert all(copy.is_finished for copy in before)
            assert device.alive == []
            device.content = {layer: number + 10 for layer, number in device.content.items()}
            continue
        number, in_backward = use
        (found,) = prefetcher.fetch(layers[number], in_backward)
        assert int(found) == device.content[layers[number]]
    assert device.most <= 2
