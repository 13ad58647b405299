"""The optimiser for matrices: momentum whose update is made orthogonal (Muon, Keller Jordan 2024)."""

from collections import defaultdict

import torch
from torch import Tensor

from .network import NARROW

# Coefficients of the published quintic iteration.
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push all singular values of each matrix (count, rows, columns) towards one."""
    x = matrices.bfloat16() if NARROW else matrices
    flipped = x.shape[-2] > x.shape[-1]
    if flipped:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return (x.mT if flipped else x).to(matrices.dtype)


class Muon:
    """Steps matrices of equal shape together, which keeps the many small products fast."""

    def __init__(self, parameters: dict[str, Tensor], momentum: float = 0.95) -> None:
        self.parameters, self.momentum = parameters, momentum
        self.buffers = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self._groups: dict[torch.Size, list[str]] = defaultdict(list)
        for name, parameter in parameters.items():
            self._groups[parameter.shape].append(name)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with the gradients now stored; weight decay is 0.01 of the rate."""
        for shape, names in self._groups.items():
            updates = []
            for name in names:
                gradient, buffer = self.parameters[name].grad, self.buffers[name]
                assert gradient is not None
                buffer.lerp_(gradient, 1 - self.momentum)
                updates.append(gradient.lerp(buffer, self.momentum))
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for name, update in zip(names, orthogonal(torch.stack(updates)), strict=True):
                self.parameters[name].mul_(1 - 0.01 * rate).add_(update, alpha=-rate * scale)
