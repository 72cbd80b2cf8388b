#!/usr/bin/env bash
# An unmodified vLLM server with kvtier's sidecar below it: serve.sh MODEL [OPTIONS OF VLLM ...]. Ctrl-C ends both.
set -euo pipefail

model=${1:?"usage: serve.sh MODEL [OPTIONS OF VLLM ...]"}
shift
kvtier=${KVTIER:-kvtier}               # the command of the environment that kvtier is installed in
vllm_python=${VLLM_PYTHON:-python3}    # of vLLM's environment, in which kvtier is installed too
host=${KVTIER_HOST:-8GiB}              # host memory, in /dev/shm
disk=${KVTIER_DISK:-$HOME/.cache/kvtier-sidecar:100GiB}
run=${KVTIER_RUN:-${XDG_RUNTIME_DIR:-/tmp}}
socket=$run/kvtier.sock

stop() { # vLLM first: what it has computed is in the sidecar then, which writes it to disk
  trap - EXIT INT TERM
  for process in ${vllm_pid:-} ${sidecar_pid:-}; do
    kill -TERM "$process" 2>/dev/null && wait "$process"
  done
}
trap stop EXIT
trap 'exit 0' INT TERM

"$kvtier" sidecar --host-memory "$host" --disk "$disk" --socket "$socket" --listen "ipc://$run/kvtier-lmcache.sock" \
  --http-port "${KVTIER_HTTP_PORT:-9464}" &
sidecar_pid=$!

# vLLM attaches whenever the sidecar is there, and serves without it until then.
"$vllm_python" -m vllm.entrypoints.openai.api_server --model "$model" --kv-transfer-config '{
    "kv_connector": "KVTierConnector",
    "kv_connector_module_path": "kvtier.connectors.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"sidecar": "'"$socket"'"}
  }' "$@" &
vllm_pid=$!
wait -n "$sidecar_pid" "$vllm_pid"
