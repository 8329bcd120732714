#!/bin/sh
# Starts Heddle where pip installed it, with libtorch of the torch wheel beside it. HEDDLE_TORCH_DIR names another folder 'torch'.
bin=$(dirname "$(readlink -f "$0")")
for site in "$bin"/../lib/python3*/site-packages "$bin"/../lib/python3*/dist-packages "$bin"/../local/lib/python3*/dist-packages; do
  [ -x "$site/heddle/heddle" ] && home=$site/heddle && break
done
if [ -z "${home:-}" ]; then
  echo "error: the folder 'heddle' of the installed wheel is not where pip puts it for $bin: install heddle again" >&2
  exit 1
fi
torch=${HEDDLE_TORCH_DIR:-$site/torch}
# With a user's own folder of packages torch may stand in the system's.
if [ -z "${HEDDLE_TORCH_DIR:-}" ] && [ ! -e "$torch/lib/libtorch_cpu.so" ]; then
  torch=$(python3 -c 'import importlib.util as u; s = u.find_spec("torch"); print(s.submodule_search_locations[0] if s else "")' 2> /dev/null)
fi
if [ ! -e "$torch/lib/libtorch_cpu.so" ]; then
  echo "error: ${HEDDLE_TORCH_DIR:+HEDDLE_TORCH_DIR=$HEDDLE_TORCH_DIR holds }no torch/lib/libtorch_cpu.so: pip install torch==@TORCH_VERSION@, or set HEDDLE_TORCH_DIR to the folder 'torch' of one" >&2
  exit 2
fi
LD_LIBRARY_PATH=$torch/lib:$(dirname "$torch")/nvidia/cu13/lib:$home${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "$home/heddle" "$@"
