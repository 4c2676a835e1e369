"""PyTorch: full-precision models of cloud workers, from safetensors and a factory named in the worker's own config."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.errors import ConfigError, EngineError
from common.serving.engine import Batch, EngineFingerprint, Outputs
from common.serving.latency import LatencyModel
from common.tensors import BF16, Array
from hardware.engines.base import EngineRequest, gather, import_factory, scatter, warm_up


class TorchEngine:
    def __init__(self, request: EngineRequest, module: torch.nn.Module, device: torch.device) -> None:
        self._config = request.config
        self._module: torch.nn.Module | None = module
        self._device = device
        self.fingerprint = EngineFingerprint(
            engine="torch", engine_version=str(torch.__version__), variant=request.variant, device=str(device)
        )

    def warm(self) -> LatencyModel:
        return warm_up(self.run, self._config)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[Outputs | Exception]:
        if self._module is None:
            raise EngineError(self._config.name, "the engine is closed")
        inputs = gather(batch)
        arguments = [_to_torch(inputs[spec.name]).to(self._device) for spec in self._config.inputs]
        result: Any = self._module(*arguments)
        values = result if isinstance(result, list | tuple) else (result,)
        names = [spec.name for spec in self._config.outputs]
        return scatter({name: _to_numpy(value) for name, value in zip(names, values, strict=True)}, batch)

    def close(self) -> None:
        self._module = None


def _to_torch(array: Array) -> torch.Tensor:
    if array.dtype == BF16:
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(array)


def _to_numpy(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().contiguous().view(torch.int16).numpy().view(BF16)
    return tensor.cpu().numpy()


def open_engine(request: EngineRequest) -> TorchEngine:
    """Calls the factory, loads the parameters (all of them, no others). Raises `ConfigError` or `EngineError`."""
    config = request.config
    factory = request.factories.get(config.name)
    if factory is None:
        raise ConfigError(
            "worker config", f"factories.{config.name}", "no torch factory is named for this model", "module:callable"
        )
    checkpoint = next((path for path in request.files if path.suffix == ".safetensors"), None)
    if checkpoint is None:
        raise EngineError(config.name, "the release has no .safetensors file for torch")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(request.threads)
    module = import_factory(factory, f"factories.{config.name}")()
    try:
        module.load_state_dict(load_file(checkpoint))
    except (OSError, RuntimeError, SafetensorError) as exc:
        raise EngineError(config.name, f"{checkpoint.name} does not fit {factory}: {exc}") from exc
    return TorchEngine(request, module.eval().to(device), device)
