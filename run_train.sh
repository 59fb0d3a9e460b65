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
refuse() {
    echo "outlast: $1" >&2
    exit 2
}
[[ $ranks =~ ^[1-9][0-9]{0,3}$ ]] || refuse "NGPU=$ranks: expected a number of ranks, 1 or more"
[[ ${LOG_RANK:=0} =~ ^[0-9]+(,[0-9]+)*$ ]] || refuse "LOG_RANK=$LOG_RANK: expected numbers of ranks, as 0,1"
[[ ${MAX_RESTARTS:=0} =~ ^[0-9]+$ ]] || refuse "MAX_RESTARTS=$MAX_RESTARTS: expected a number"
# The caller's environment if outlast is in it, else the clone's own.
if [ -x "$root/.venv/bin/python" ] && ! { command -v torchrun && command -v outlast; } >/dev/null; then
    export PATH="$root/.venv/bin:$PATH"
fi
command -v torchrun >/dev/null ||
    refuse "torchrun isn't there: run scripts/check or scripts/demo once, or activate an environment with outlast"
# torch warns of each connection whose address has no name, which is usual on private networks.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
exec python -m outlast.torchrun --nproc-per-node "$ranks" --max-restarts "$MAX_RESTARTS" \
    --role rank --tee 3 --local-ranks-filter "$LOG_RANK" \
    -m "${TRAIN_FILE:-outlast.train}" --config "$config" "$@"
