"""Refusal of files beside config.json that change the meaning of the weights.

Nothing here needs torch.
"""

from __future__ import annotations

from pathlib import Path

from dms_train.hf.errors import HFError

# ModelOpt writes hf_quant_config.json, GPTQ quantize_config.json, AWQ quant_config.json, AutoRound
# and ExLlamaV3 quantization_config.json, Quanto quanto_qmap.json and quantization_map.json,
# msModelSlim quant_model_description.json, Neural Compressor qconfig.json.
_QUANTIZED = ("*quant*.json", "qconfig.json", "compression_config.json")
# transformers applies an adapter that it finds beside the weights.
_ADAPTER = "adapter_config.json"


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
    if (directory / _ADAPTER).is_file():
        raise HFError(
            f"{directory / _ADAPTER}: adapters are not applied; merge the adapter into the weights"
        )
