"""Prepare training data: the command `dms-data`."""

from dms_train.data_prep.prepare import main

if __name__ == "__main__":
    raise SystemExit(main())
