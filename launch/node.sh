#!/usr/bin/env bash
# Start a module on this node of several: see dms_train/launch/node.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../dms_train/launch/node.sh" "$@"
