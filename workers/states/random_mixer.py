"""A mixer between its projections with random weights, for self-tests: by plain torch or by kernels."""

import torch
from torch import Tensor

from meshlm.kernels.ssd.reference import TimeSteps
from meshlm.protocol.layers import StateSpec
from meshlm.workers.batch import StateCache
from meshlm.workers.states.step import StepStates


class RandomMixer:
    """Its weights are as models begin with. What it is given is a line of `width` numbers of each token, whose parts are the inputs, as
    those of a model are parts of one product."""

    def __init__(self, state: StateSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._device, heads = device, state.num_heads
        self._state, self._numbers = state, state.n_groups * state.state_size
        rest = {
            "mamba2": [heads],  # dt
            "gated_delta_net": [heads, heads],  # a, b
            "mamba": [state.inner, state.state_size, state.state_size],  # dt, B, C
            "short_conv": [],
        }[state.kind]
        self._sizes = [state.inner, state.conv_dim, *rest]
        self.width = sum(self._sizes)
        self._weight = (self._some(state.conv_dim, state.conv_kernel) * 0.5).to(dtype)
        self._bias = self._some(state.conv_dim).to(dtype) if state.conv_bias else None
        columns = [state.state_size] if state.kind == "mamba" else []
        self._a = -torch.linspace(0.1, 16, heads, device=device).view(heads, *[1] * len(columns)).repeat(1, *columns)
        self._shift, self._d = self._some(heads) - 3, self._some(heads)

    def _some(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device)

    def run(self, given: Tensor, states: StepStates, cache: StateCache) -> list[Tensor]:
        """What the convolution gives, and the layer's own operation, if it has one. given [t, width]."""
        state = self._state
        gate, inputs, *rest = given.split(self._sizes, dim=1)
        mixed = states.conv(inputs, self._weight, self._bias, cache, silu=state.kind != "short_conv")
        match state.kind:
            case "short_conv":
                return [mixed]
            case "mamba2":
                found = self._ssd(mixed, rest[0], states, cache)
            case "gated_delta_net":
                found = self._gated_delta(mixed, rest[0], rest[1], states, cache)
            case "mamba":
                dt, b, c = rest[0] + self._shift.to(given.dtype), rest[1], rest[2]
                found = states.selective_scan(mixed, dt, self._a, b, c, self._d, gate, cache)
        return [mixed, found]

    def _ssd(self, mixed: Tensor, dt: Tensor, states: StepStates, cache: StateCache) -> Tensor:
        state = self._state
        x, b, c = mixed.split([state.inner, self._numbers, self._numbers], dim=1)
        groups = (len(x), state.n_groups, state.state_size)
        heads = x.reshape(len(x), state.num_heads, state.head_dim)
        steps = TimeSteps(dt, self._shift)
        return states.ssd(heads, steps, self._a, b.reshape(groups), c.reshape(groups), self._d, cache)

    def _gated_delta(self, mixed: Tensor, a: Tensor, b: Tensor, states: StepStates, cache: StateCache) -> Tensor:
        state = self._state
        q, k, v = mixed.split([self._numbers, self._numbers, state.inner], dim=1)
        query, key = (each.unflatten(1, (state.n_groups, state.state_size)) for each in (q, k))
        heads = v.unflatten(1, (state.num_heads, state.head_dim))
        return states.gated_delta(query, key, heads, a, b, self._a, self._shift, cache)
