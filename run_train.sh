#!/usr/bin/env bash
# One replica group (or a plain run) under torchrun: NGPU ranks on this machine, with or without GPUs.
#
#   NGPU=2 CONFIG_FILE=configs/llama3_debug.toml ./run_train.sh [--section.key=value ...]
#
#   TRAIN_FILE     module to run; outlast.ft.train: as one of several groups    (default: outlast.train, the plain trainer)
#   CONFIG_FILE    TOML, from here or from the clone      (default: configs/llama3_debug.toml)
#   NGPU           ranks of this group                    (default: 1)
#   LOG_RANK       ranks whose output is shown, as 0,1    (default: 0)
#   MAX_RESTARTS   times that torchrun starts the group again after one of its ranks died  (default: 0)
#   REPLICA_GROUP_ID, TORCHFT_LIGHTHOUSE (http://localhost:29510), OUTLAST_TOKEN, RUST_LOG, CUDA_VISIBLE_DEVICES: as they are
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ranks=${NGPU:-1}
config=${CONFIG_FILE:-configs/llama3_debug.toml}
[ -e "$config" ] || { [ -e "$root/$config" ] && config=$root/$config; } || true
if [[ ! $ranks =~ ^[1-9][0-9]*$ ]]; then
    echo "run_train.sh: NGPU=$ranks: expected a number of ranks, 1 or more" >&2
    exit 2
fi
# The caller's environment if outlast is in it, else the clone's own.
if [ -x "$root/.venv/bin/torchrun" ] && ! { command -v torchrun && command -v outlast; } >/dev/null; then
    export PATH="$root/.venv/bin:$PATH"
fi
if ! command -v torchrun >/dev/null; then
    echo "run_train.sh: torchrun isn't there: run scripts/check or scripts/demo once, or activate an environment with outlast" >&2
    exit 2
fi
# torchrun gives each rank one thread unless told; ours shares the cores among the ranks of this machine.
export TORCHFT_LIGHTHOUSE=${TORCHFT_LIGHTHOUSE:-http://localhost:29510}
exec torchrun --nproc-per-node "$ranks" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint localhost:0 --local-addr 127.0.0.1 \
    --role rank --tee 3 --local-ranks-filter "${LOG_RANK:-0}" \
    -m "${TRAIN_FILE:-outlast.train}" --config "$config" "$@"
