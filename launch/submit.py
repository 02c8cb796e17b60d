"""Submit chains of SLURM jobs: the command `dms-submit`."""

from dms_train.launch.submit import main

if __name__ == "__main__":
    raise SystemExit(main())
