"""`dms-train`: compose the configuration, then run its stages.

`dms-train experiment=NAME key=value` is one run; Hydra only composes its values. Hydra's flags are
accepted too: `--help`, `--cfg job` (prints the composed configuration), and `-m` for several
consecutive runs, such as `-m optim.lr=1e-4,3e-4 'run.dir=outputs/lr-${optim.lr}'`.

`--until STAGE` stops after that stage; the same command without it continues the run. With
`--frozen RUN/config.yaml` that file is the configuration and nothing is composed.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

from dms_train.cli.errors import run_main, run_process
from dms_train.config.build import ConfigError
from dms_train.config.frozen import read_frozen
from dms_train.config.schema import RunConfig

_SESSION = "dms_train.app.session"


def main() -> None:
    """Run the command; exit code 0, 2 for a refused configuration or data, 130 for Ctrl-C."""
    run_process(lambda: _main(sys.argv[1:]))


def _main(arguments: list[str]) -> int:
    flags, words = _parse(arguments)
    if flags.config_dir is not None and not flags.config_dir.is_dir():
        raise ConfigError(f"--config-dir={flags.config_dir}: no such folder")
    if flags.frozen is not None:
        if words:
            raise ConfigError(f"--frozen: takes no overrides; leave {' '.join(words)} out")
        _run(read_frozen(flags.frozen), flags.until)
        return 0
    from dms_train.cli.config_source import compose, explain

    if not flags.hydra:
        _run(compose(words, flags.config_dir), flags.until)
        return 0
    if flags.until is not None:
        raise ConfigError("--until: cannot be combined with flags of Hydra")
    explain([word for word in words if "=" in word], flags.config_dir)
    _hydra_application()
    return 0


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split off our own flags; Hydra handles any other flag, and `hydra` is then true."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--until")
    parser.add_argument("--frozen", type=Path)
    flags, words = parser.parse_known_args(arguments)
    flags.hydra = any(word.startswith("-") for word in words)
    return flags, words


def _run(config: RunConfig, until: str | None = None) -> None:
    imported = _SESSION in sys.modules
    gc.disable()  # passes over what imports leave in memory take a second
    from dms_train.app.session import run  # after the configuration was checked

    gc.enable()
    if not imported:
        gc.freeze()  # megatron collects garbage before each checkpoint: not among what is imported
    run(config, until)


def _hydra_application() -> None:
    """Let Hydra handle its flags: it runs every point of a multirun, or prints and runs nothing."""
    import hydra

    from dms_train.cli.config_source import CONF_DIR, CONFIG_NAME, from_hydra

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=CONFIG_NAME)
    def run_point(node: Any) -> None:
        code = run_main(lambda: _run(from_hydra(node)))
        if code:
            sys.exit(code)

    run_point()


if __name__ == "__main__":
    main()
