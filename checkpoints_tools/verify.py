"""Verify an export: the command `dms-verify`."""

from dms_train.checkpoints_tools.verify import main

if __name__ == "__main__":
    raise SystemExit(main())
