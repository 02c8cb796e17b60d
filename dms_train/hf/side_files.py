"""Files beside config.json that change the meaning of the weights; most are refused.

Nothing here needs torch.
"""

from __future__ import annotations

from pathlib import Path

from dms_train.hf.errors import HFError

# ModelOpt writes hf_quant_config.json, GPTQ quantize_config.json, AWQ quant_config.json, AutoRound
# and ExLlamaV3 quantization_config.json, Quanto quanto_qmap.json and quantization_map.json,
# msModelSlim quant_model_description.json, Neural Compressor qconfig.json.
_QUANTIZED = ("*quant*.json", "qconfig.json", "compression_config.json")
# Not beside config.json: with PEFT installed, AutoModel would follow it to the plain base model.
ADAPTER_CONFIG = "adapter/adapter_config.json"
_FOREIGN_ADAPTER = "adapter_config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def is_adapter(directory: Path) -> bool:
    """Return whether a directory is an export in format `peft`, which has no weights of its own."""
    has_weights = any((directory / name).is_file() for name in _WEIGHTS)
    parts = (ADAPTER_CONFIG, "config.json")
    return not has_weights and all((directory / name).is_file() for name in parts)


def refuse_side_files(directory: Path) -> None:
    """Refuse a directory whose weights are quantised or go with an adapter.

    Raises:
        HFError: Such a file exists; the message names it.
    """
    for pattern in _QUANTIZED:
        for file in sorted(directory.glob(pattern)):
            raise HFError(
                f"{file}: the weights are quantised, which is not supported; use the original "
                "model, or delete this file if the weights were converted back"
            )
    # transformers applies an adapter that it finds beside the weights
    if (directory / _FOREIGN_ADAPTER).is_file():
        raise HFError(
            f"{directory / _FOREIGN_ADAPTER}: adapters are not applied to weights beside them; "
            "merge the adapter into the weights"
        )
