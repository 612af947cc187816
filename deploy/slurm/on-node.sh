#!/bin/bash
# One daemon of the job on this node: on-node.sh etcd|relay|engine|gateway. laminar.sbatch starts it by srun, with HEAD,
# HEAD_ENGINE, SCRATCH and the variables of job.env in the environment.
set -euo pipefail

node=${SLURMD_NODENAME:?it is started by srun}

# Slurm starts nothing again. This does, unless the daemon ended well (0), was called wrongly (2), or the job ends.
# srun passes SIGTERM on to the daemon as well as to this shell, which has to outlive it: with the shell, the step ends.
keep() {
  local status stopping=""
  trap 'stopping=1' TERM INT
  while true; do
    status=0
    "$@" || status=$?
    if [[ -n $stopping ]]; then exit 0; fi
    if [[ $status == 0 || $status == 2 ]]; then exit "$status"; fi
    echo "on-node: $1 ended with $status and is started again" >&2
    sleep 2
    if [[ -n $stopping ]]; then exit 0; fi
  done
}

engine_host=${ENGINE_HOST:-$node}

case ${1:?etcd, relay, engine or gateway} in
  etcd)
    # Its disk is the node's own: a network file system is too slow for its syncs. One member is enough for a job, which
    # ends with its first node in any case.
    keep etcd --data-dir "$SCRATCH/etcd" --listen-client-urls "http://0.0.0.0:$ETCD_PORT" \
      --advertise-client-urls "http://$HEAD:$ETCD_PORT" --listen-peer-urls http://127.0.0.1:0
    ;;
  relay)
    # The trainer publishes on the first node; a node with an engine registers it. The pool is in /dev/shm, which all
    # steps of a job on a node share, also where Slurm gives each job one of its own. Nothing stays there after the job.
    options=()
    if [[ $node != "$HEAD" ]]; then options+=(--no-publish-host); fi
    if [[ $node != "$HEAD" || -n $HEAD_ENGINE ]]; then
      options+=(--engine "$ENGINE_KIND=http://$engine_host:$ENGINE_PORT${ENGINE_TLS_PORT:+@$ENGINE_TLS_PORT}")
    fi
    # shellcheck disable=SC2086  # options are words
    keep paramserver serve --name "$node" --host "$node" --port "$RELAY_PORT" --metrics-port "$METRICS_PORT" \
      --etcd "$HEAD:$ETCD_PORT" --pool-bytes "$POOL_BYTES" --forget "${options[@]}" $RELAY_OPTIONS "$RELAY_ACCESS"
    ;;
  engine)
    # shellcheck disable=SC2086
    if [[ $ENGINE_KIND == vllm ]]; then
      export VLLM_SERVER_DEV_MODE=1
      keep vllm serve "$MODEL_DIR" --served-model-name "$MODEL" --host "$engine_host" --port "$ENGINE_PORT" \
        --logprobs-mode processed_logprobs --weight-transfer-config '{"backend": "laminar"}' $ENGINE_OPTIONS
    else
      keep gateway engine --model "$MODEL_DIR" --served-model-name "$MODEL" --host "$engine_host" --port "$ENGINE_PORT" \
        $ENGINE_OPTIONS $ENGINE_ACCESS
    fi
    ;;
  gateway)
    # shellcheck disable=SC2086
    keep gateway serve --model "$MODEL" --tokenizer "$MODEL_DIR" --data "$SCRATCH/gateway" --host "$HEAD" \
      --port "$GATEWAY_PORT" --etcd "$HEAD:$ETCD_PORT" $GATEWAY_OPTIONS "$GATEWAY_ACCESS" ${GATEWAY_CREDENTIALS:+"$GATEWAY_CREDENTIALS"}
    ;;
  *)
    echo "on-node: no daemon $1" >&2
    exit 2
    ;;
esac
