#!/bin/sh
# Starts Heddle from an installed tree. HEDDLE_TORCH_DIR, if set, names the folder whose lib/ holds libtorch_cpu.so.
home=$(dirname "$(dirname "$(readlink -f "$0")")")/lib/heddle
if [ -n "${HEDDLE_TORCH_DIR:-}" ] && [ ! -e "$HEDDLE_TORCH_DIR/lib/libtorch_cpu.so" ]; then
  echo "error: HEDDLE_TORCH_DIR=$HEDDLE_TORCH_DIR holds no lib/libtorch_cpu.so (the folder 'torch' of an installed torch 2.11)" >&2
  exit 2
fi
LD_LIBRARY_PATH=${HEDDLE_TORCH_DIR:+$HEDDLE_TORCH_DIR/lib:}$home${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "$home/heddle" "$@"
