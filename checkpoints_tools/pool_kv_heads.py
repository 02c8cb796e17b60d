"""Convert a dense model to fewer KV heads: the command `dms-gqa`."""

from dms_train.checkpoints_tools.pool_kv_heads import main

if __name__ == "__main__":
    raise SystemExit(main())
