"""Export a Megatron checkpoint to Hugging Face format: the command `dms-export`."""

from dms_train.checkpoints_tools.megatron_to_hf import main

if __name__ == "__main__":
    raise SystemExit(main())
