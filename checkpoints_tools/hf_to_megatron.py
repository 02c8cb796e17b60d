"""Convert a Hugging Face checkpoint to a Megatron checkpoint: the command `dms-import`."""

from dms_train.checkpoints_tools.hf_to_megatron import main

if __name__ == "__main__":
    raise SystemExit(main())
