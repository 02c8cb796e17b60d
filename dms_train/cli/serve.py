"""Serve a model, dense or retrofitted, over HTTP with OpenAI's request and response formats.

An export runs on the compact cache, which frees what the model evicts or merges. Every
answer reports the size and the reads of the KV cache of its request.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from dms_train.app import launcher
from dms_train.cli.engine_arguments import add_engine, engine_options
from dms_train.cli.errors import run_main
from dms_train.inference.options import NOT_SUPPORTED
from dms_train.observe import log
from dms_train.server.options import ServerOptions

_DEFAULTS = ServerOptions()
_EPILOG = """\
examples:
  dms-serve outputs/demo/hf
  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "1x+2=5:", "max_tokens": 32}'

  dms-serve outputs/cr4/exports/final/hf --device cuda --host 0.0.0.0 --max-num-seqs 64
  DMS_API_KEY=secret dms-serve MODEL        # clients send Authorization: Bearer secret

http://127.0.0.1:8000/ in a browser shows a text and which of its tokens the cache still holds.
SIGTERM stops the server after the requests that run. docs/guides/serving.md describes routes,
limits and metrics.
"""


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dms-serve",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="model directory or export, dense or retrofitted")
    _add_server(parser)
    _add_limits(parser)
    add_engine(parser)
    args, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        option = word.partition("=")[0]
        reason = NOT_SUPPORTED.get(option.removeprefix("--").replace("-", "_"))
        if reason is not None:
            parser.error(f"{option}: {reason}; leave it out")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _add_server(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--host", default=_DEFAULTS.host, help="address to listen on (%(default)s)")
    add("--port", type=int, default=_DEFAULTS.port, help="0 takes a free one (%(default)s)")
    add("--served-model-name", metavar="NAME", help="name in requests (default: MODEL as given)")
    add(
        "--api-key",
        metavar="KEY",
        help="key that clients must send (default: environment variable DMS_API_KEY, else none)",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages of this origin may use the server in a browser, such as https://example.org,"
        " or * for all; may be repeated",
    )
    add(
        "--default-chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template where a request does not set them, "
        "such as '{\"enable_thinking\": false}' for Qwen3",
    )
    add(
        "--drain-seconds",
        type=float,
        default=_DEFAULTS.drain_seconds,
        help="time for running requests to finish after SIGTERM (%(default)s)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    add(
        "--max-queue",
        type=int,
        default=_DEFAULTS.max_queue,
        help="sequences that may wait for --max-num-seqs; more are answered with 429 (%(default)s)",
    )
    add(
        "--max-body-bytes",
        type=int,
        default=_DEFAULTS.max_body_bytes,
        help="limit of a request body; a larger one gets 413 (%(default)s)",
    )
    add("--max-prompt-tokens", type=int, help="of a prompt (default: what the model takes)")
    add(
        "--request-seconds",
        type=float,
        default=_DEFAULTS.request_seconds,
        help="time after which a request is ended (%(default)s)",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r}: give an object such as {{"name": 1}}')
    return value


def _options(args: argparse.Namespace) -> ServerOptions:
    return ServerOptions(
        host=args.host,
        port=args.port,
        api_key=args.api_key if args.api_key is not None else launcher.api_key(),
        cors_origins=tuple(args.cors_origin),
        max_queue=args.max_queue,
        max_body_bytes=args.max_body_bytes,
        max_prompt_tokens=args.max_prompt_tokens,
        request_seconds=args.request_seconds,
        drain_seconds=args.drain_seconds,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
    )


def _serve(args: argparse.Namespace) -> int:
    options, engine = _options(args), engine_options(args)
    from dms_train.server.run import serve

    log.configure()
    return serve(args.model, args.served_model_name or args.model, engine, options)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit code 0 after SIGTERM or Ctrl-C, 1 for a broken engine, else 2."""
    args = _parse(arguments)
    return run_main(lambda: _serve(args))


if __name__ == "__main__":
    sys.exit(main())
