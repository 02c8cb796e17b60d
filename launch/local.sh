#!/usr/bin/env bash
# Run the trainer on one node: see dms_train/launch/local.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../dms_train/launch/local.sh" "$@"
