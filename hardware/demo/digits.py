"""``digits``: a small CNN for scikit-learn's 8 x 8 digits, and the versions of it that a tour pushes.

Owns the network (`factory`, also named by workers), its training and the stages:

    v1         a short training
    v2         v1 trained further
    v3         v2 with only its last layer trained further
    collapsed  v3 with one channel of `conv1` scaled up and `conv2`'s weights for it scaled down by the same power of
               two: bit for bit the same function in FP32, but that channel sets the range of the whole tensor, so in
               INT8 all other channels round to nothing. Only `conv2` in float would help, and it does most of the MACs.
    v4         v3 trained further
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from common.tensors import Array

Stage = Literal["v1", "v2", "v3", "collapsed", "v4"]
STAGES: tuple[Stage, ...] = ("v1", "v2", "v3", "collapsed", "v4")

_LOUD = 2.0**14
_BATCH = 64


class DigitsNet(nn.Module):
    """float32 [n, 1, 8, 8] in 0..1 to logits [n, 10]. `hidden` has 9/10 of the parameters, `last` 1/100."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 256)
        self.last = nn.Linear(256, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv1(pixels))
        x = torch.relu(self.conv2(x))
        x = torch.max_pool2d(x, 2).flatten(1)
        logits: torch.Tensor = self.last(torch.relu(self.hidden(x)))
        return logits


def factory() -> nn.Module:
    return DigitsNet()


def parameters(stage: Stage, pixels: Array, labels: Array) -> dict[str, Array]:
    """The stage's checkpoint, trained on the rows given: same rows and same build of torch, same bytes."""
    return next(checkpoint for name, checkpoint in stages(pixels, labels) if name == stage)


def stages(pixels: Array, labels: Array) -> Iterator[tuple[Stage, dict[str, Array]]]:
    """Every stage with its checkpoint, in the order of `STAGES`: each is trained on from the one before."""
    net = _fresh()
    training = _Training(torch.from_numpy(pixels), torch.from_numpy(labels))
    training.run(net, net.parameters(), epochs=8, rate=1e-3)
    yield "v1", _checkpoint(net)
    training.run(net, net.parameters(), epochs=4, rate=3e-4)
    yield "v2", _checkpoint(net)
    training.run(net, net.last.parameters(), epochs=4, rate=1e-3)
    yield "v3", _checkpoint(net)
    loud = copy.deepcopy(net)
    _collapse(loud, pixels)
    yield "collapsed", _checkpoint(loud)
    training.run(net, net.parameters(), epochs=2, rate=3e-4)
    yield "v4", _checkpoint(net)


def _fresh() -> DigitsNet:
    """The same first weights each time, whatever the caller did with the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DigitsNet()


def _checkpoint(net: DigitsNet) -> dict[str, Array]:
    return {name: tensor.detach().numpy().copy() for name, tensor in net.state_dict().items()}


class _Training:
    """Adam on the cross entropy, rows in an order of its own; one thread, so that sums have one order."""

    def __init__(self, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        self._pixels, self._labels = pixels, labels
        self._order = torch.Generator().manual_seed(0)

    def run(self, net: DigitsNet, trained: Iterator[nn.Parameter], *, epochs: int, rate: float) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._run(net, torch.optim.Adam(trained, lr=rate), epochs)
        finally:
            torch.set_num_threads(threads)

    def _run(self, net: DigitsNet, optimizer: torch.optim.Optimizer, epochs: int) -> None:
        for _ in range(epochs):
            for rows in torch.split(torch.randperm(len(self._pixels), generator=self._order), _BATCH):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(self._pixels[rows]), self._labels[rows])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()


def _collapse(net: DigitsNet, pixels: Array) -> None:
    with torch.no_grad():
        channels = torch.relu(net.conv1(torch.from_numpy(pixels))).amax(dim=(0, 2, 3))
        loudest = int(channels.argmax())
        net.conv1.weight[loudest] *= _LOUD
        net.conv1.bias[loudest] *= _LOUD  # type: ignore[index]
        net.conv2.weight[:, loudest] /= _LOUD
