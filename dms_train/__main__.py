"""`python -m dms_train` is `dms-train`; what torchrun's `-m` needs."""

from __future__ import annotations

from dms_train.cli.train import main

if __name__ == "__main__":
    main()
