"""Describe a checkpoint or a run: the command `dms-inspect`."""

from dms_train.checkpoints_tools.inspect_folder import main

if __name__ == "__main__":
    raise SystemExit(main())
